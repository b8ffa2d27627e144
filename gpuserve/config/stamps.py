"""What tells that a file, or anything in a folder, has changed. Nothing is read but what the file system says
of the files. What Python and models' own tools put there does not count: ``__pycache__``, and names that
begin with a dot.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from typing import Final

_PASSED_OVER: Final = ("__pycache__",)


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
        entries = list(os.scandir(folder))
    except OSError:  # it goes away while it is looked at
        return
    for entry in entries:
        name = os.path.join(within, entry.name)
        if entry.name in _PASSED_OVER or entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield name, (0, 0, 0)
            yield from _files(entry.path, name, seen)
        elif (stamp := file_stamp(entry.path)) is not None:
            yield name, stamp
