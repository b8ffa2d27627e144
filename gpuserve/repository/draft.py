"""The entry of a config file that a model folder stands for, while it is written: its values, which fields of
the config.pbtxt they came from, what is wrong, and what is worth a line in the log. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gpuserve.config.positions import Path
from gpuserve.repository.pbtxt import Pbtxt


class Remark(NamedTuple):
    """A sentence about the field at a path of the config.pbtxt."""

    path: Path
    text: str


class Draft:
    """What the parts of the translation write to. ``entry`` has what all versions have alike."""

    def __init__(self, name: str, pbtxt: Pbtxt) -> None:
        self.name = name
        self.pbtxt = pbtxt
        self.entry: dict[str, Any] = {"name": name}
        self.faults: list[Remark] = []
        self.notes: list[Remark] = []
        self._origins: dict[Path, Path] = {}

    @property
    def message(self) -> Any:
        """The ``ModelConfig`` that the file was read as."""
        return self.pbtxt.message

    def put(self, key: str, value: Any, *origin: str | int) -> None:
        self.entry[key] = value
        self.came((key,), origin)

    def came(self, path: Path, origin: Path) -> None:
        """Note that the value at a path of the entry is that of a field."""
        self._origins[path] = origin

    def fault(self, path: Path, text: str) -> None:
        self.faults.append(Remark(path, text))

    def note(self, path: Path, text: str) -> None:
        self.notes.append(Remark(path, text))

    def origin(self, path: Path) -> Path:
        """The field of the value at a path of the entry, or of what it is in; () for none."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._origins:
                found = self._origins[path[:length]]
                return (*found, *path[length:]) if self.pbtxt.has(*found, *path[length:]) else found
        return ()


def listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words)) or "none"
