"""What tells that a file, or anything in a folder, has changed. Nothing is read but what the file system says
of the files. What Python and models' own tools put there does not count: ``__pycache__``, and names that
begin with a dot.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterator
from typing import Final

_PASSED_OVER: Final = ("__pycache__",)
#: The stamp of a folder in a folder.
_FOLDER: Final = (0, 0, 0)


def file_stamp(path: str) -> tuple[int, int, int] | None:
    """Something that differs once the file is another, or has other contents; None where there is none."""
    try:
        return _stamp(os.stat(path))
    except OSError:
        return None


def folder_stamp(path: str) -> Hashable:
    """The same of all the files in a folder, and in the folders in it, links followed."""
    return tuple(sorted(_files(path, "", set())))


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _files(
    folder: str, within: str, seen: set[tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    try:
        there = os.stat(folder)
        if (there.st_dev, there.st_ino) in seen:  # a link to a folder that it is in
            return
        seen.add((there.st_dev, there.st_ino))
    except OSError:  # it goes away while it is looked at
        return
    for entry in _entries(folder):
        name = os.path.join(within, entry.name)
        if entry.name in _PASSED_OVER or entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield name, _FOLDER
            yield from _files(entry.path, name, seen)
        elif (stamp := file_stamp(entry.path)) is not None:
            yield name, stamp


def shallow_stamp(folder: str) -> Hashable:
    """The same of what lies in a folder itself."""
    there = [one for one in _entries(folder) if one.name not in _PASSED_OVER and not one.name.startswith(".")]
    return tuple(sorted((one.path, _FOLDER if one.is_dir() else file_stamp(one.path)) for one in there))


def sources_stamp(folder: str, without: Collection[str] = ()) -> Hashable:
    """The same of the Python files in a folder, and in the packages there: what an import may find."""
    return tuple(
        sorted(
            (path, stamp)
            for one in (folder, *package_folders(folder))
            for path in _python_files(one)
            if path not in without and (stamp := file_stamp(path)) is not None
        )
    )


def package_folders(folder: str) -> list[str]:
    """The folders in a folder that may be packages; a virtual environment is none."""
    return sorted(
        one.path
        for one in _entries(folder)
        if one.is_dir()
        and one.name.isidentifier()
        and one.name not in _PASSED_OVER
        and not os.path.exists(os.path.join(one.path, "pyvenv.cfg"))
    )


def folders_in(folder: str) -> list[str]:
    """A folder, and the folders in it at any depth, as far as ``folder_stamp`` looks; links are followed."""
    inner = [os.path.join(folder, name) for name, stamp in _files(folder, "", set()) if stamp == _FOLDER]
    return [folder, *inner]


def _python_files(folder: str) -> list[str]:
    return [one.path for one in _entries(folder) if one.name.endswith(".py")]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # it is gone
        return []
