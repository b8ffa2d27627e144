"""Compares two answers: equal, equal but for a text, or different. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_ABSENT = "(absent)"


class Verdict(enum.Enum):
    """The result of a comparison, best first."""

    EQUAL = "equal"
    TEXT = "text differs"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where the answers differ, and what is there in each."""

    path: str
    triton: Any
    gpuserve: Any

    @property
    def is_text(self) -> bool:
        """Whether only the words of an error differ."""
        return self.path.rpartition(".")[2] == "text"


def verdict(differences: list[Difference]) -> Verdict:
    """The worst of them."""
    if not differences:
        return Verdict.EQUAL
    return Verdict.TEXT if all(one.is_text for one in differences) else Verdict.DIFFERENT


def differences(
    triton: Any, gpuserve: Any, ignore: frozenset[str] = frozenset(), path: str = ""
) -> Iterator[Difference]:
    """Where the two trees differ. A field whose name is in ``ignore`` only has to be there in both."""
    if path.rpartition(".")[2] in ignore:
        return
    if _is_object(triton) and _is_object(gpuserve):
        yield from _of_objects(triton, gpuserve, ignore, path)
    elif isinstance(triton, list) and isinstance(gpuserve, list):
        if len(triton) != len(gpuserve):
            yield Difference(f"{path}.length", len(triton), len(gpuserve))
        for number, (first, second) in enumerate(zip(triton, gpuserve, strict=False)):
            yield from differences(first, second, ignore, f"{path}[{number}]")
    elif type(triton) is not type(gpuserve) or triton != gpuserve:
        yield Difference(path, triton, gpuserve)


def _of_objects(triton: Any, gpuserve: Any, ignore: frozenset[str], path: str) -> Iterator[Difference]:
    first, second = dict(triton), dict(gpuserve)
    if isinstance(triton, tuple):
        common = [[name for name, _ in one if name in first and name in second] for one in (triton, gpuserve)]
        if common[0] != common[1]:
            yield Difference(f"{path}.order", common[0], common[1])
    for name in {**first, **second}:
        below = f"{path}.{name}" if path else name
        if name in first and name in second:
            yield from differences(first[name], second[name], ignore, below)
        elif name not in ignore:
            yield Difference(below, first.get(name, _ABSENT), second.get(name, _ABSENT))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict | tuple)
