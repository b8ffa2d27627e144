"""Fingerprints of files and folders from metadata; ``__pycache__`` and hidden names are ignored."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterator
from typing import Final

_PASSED_OVER: Final = ("__pycache__",)
_FOLDER: Final = (0, 0, 0)


def file_fingerprint(path: str) -> tuple[int, int, int] | None:
    """Return a value that changes when a file is replaced or written, or None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def folder_fingerprint(path: str) -> Hashable:
    """Return the fingerprint of all files in a folder and in its folders; links are followed."""
    return tuple(sorted(_files(path, "", set())))


def _files(
    folder: str, within: str, seen: set[tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    try:
        there = os.stat(folder)
        if (there.st_dev, there.st_ino) in seen:  # a link to a folder that contains it
            return
        seen.add((there.st_dev, there.st_ino))
    except OSError:  # the folder was removed meanwhile
        return
    for entry in _entries(folder):
        name = os.path.join(within, entry.name)
        if entry.name in _PASSED_OVER or entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield name, _FOLDER
            yield from _files(entry.path, name, seen)
        elif (fingerprint := file_fingerprint(entry.path)) is not None:
            yield name, fingerprint


def shallow_fingerprint(folder: str) -> Hashable:
    there = [one for one in _entries(folder) if one.name not in _PASSED_OVER and not one.name.startswith(".")]
    return tuple(sorted((one.path, _FOLDER if one.is_dir() else file_fingerprint(one.path)) for one in there))


def sources_fingerprint(folder: str, without: Collection[str] = ()) -> Hashable:
    """Return the fingerprint of the Python files in a folder and its packages, which an import may find."""
    paths = [entry.path for one in (folder, *package_folders(folder)) for entry in _entries(one)]
    sources = [path for path in paths if path.endswith(".py") and path not in without]
    found = [(path, stat) for path in sources if (stat := file_fingerprint(path)) is not None]
    return tuple(sorted(found))


def package_folders(folder: str) -> list[str]:
    """Return the folders in a folder that may be packages; virtual environments are left out."""
    inner = [one for one in _entries(folder) if one.is_dir() and one.name.isidentifier()]
    return sorted(
        one.path
        for one in inner
        if one.name not in _PASSED_OVER and not os.path.exists(os.path.join(one.path, "pyvenv.cfg"))
    )


def folders_in(folder: str) -> list[str]:
    """Return a folder and its folders at any depth, as far as ``folder_fingerprint`` reads them."""
    inner = [name for name, fingerprint in _files(folder, "", set()) if fingerprint == _FOLDER]
    return [folder, *(os.path.join(folder, name) for name in inner)]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # the folder was removed
        return []
