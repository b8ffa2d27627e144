"""The levels of load that are measured one after another, and how they are written on the command line.

``1:64:x2`` doubles from 1 to 64, ``100:1000:100`` adds 100, ``1,2,8`` is a list, ``4`` is one level. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from gpuserve.bench.errors import BenchOptionError

_MAX_LEVELS = 1000
_FORM = "expected a number, a list such as 1,2,8, or a range such as 1:64:x2 or 100:1000:100"


class LoadKind(enum.Enum):
    """What is held constant while a level is measured."""

    CONCURRENCY = "concurrency"  #: requests in flight: each answer is followed by the next request
    RATE = "rate"  #: requests a second, whether they are answered or not


@dataclass(frozen=True, slots=True)
class Level:
    """So many requests in flight, or so many a second."""

    kind: LoadKind
    value: float

    def __str__(self) -> str:
        if self.kind is LoadKind.RATE:
            return f"{self.value:g}/s"
        return f"{self.value:g}"

    def share(self, part: int, parts: int) -> Level:
        """What one of several processes is to make of it."""
        if self.kind is LoadKind.RATE:
            return Level(self.kind, self.value / parts)
        whole, rest = divmod(int(self.value), parts)
        return Level(self.kind, whole + (part < rest))


def parse_levels(kind: LoadKind, text: str) -> tuple[Level, ...]:
    """The levels that an option names.

    Raises:
        BenchOptionError: it has another form, a level is not above 0, or there are too many.
    """
    option = f"--{kind.value}"
    try:
        values = tuple(_range(text) if ":" in text else map(float, text.split(",")))
    except ValueError as error:
        raise BenchOptionError(
            option, f"{error.args[0] if _is_ours(error) else _FORM}, given {text!r}"
        ) from None
    if any(not 0 < value < 1e9 for value in values):
        raise BenchOptionError(option, f"levels are above 0 and below a billion, given {text!r}")
    if kind is LoadKind.CONCURRENCY and any(value != int(value) for value in values):
        raise BenchOptionError(option, f"expected whole numbers of requests, given {text!r}")
    return tuple(Level(kind, value) for value in values)


class _RangeError(ValueError):
    """A range that has the right form and no end."""


def _is_ours(error: ValueError) -> bool:
    return isinstance(error, _RangeError)


def _range(text: str) -> Iterator[float]:
    """``first:last``, ``first:last:step`` or ``first:last:xfactor``; the last belongs to it if it is met."""
    first, last, step = (text if text.count(":") > 1 else f"{text}:1").split(":")
    value, end = float(first), float(last)
    grows = step.startswith("x")
    by = float(step[1:] if grows else step)
    if end < value or (grows and (by <= 1 or value <= 0)) or (not grows and by <= 0):
        raise _RangeError("a range goes up: its last level is not below the first, and its step leads there")
    for _ in range(_MAX_LEVELS):
        yield value
        value = value * by if grows else value + by
        if value > end * (1 + 1e-9):
            return
    raise _RangeError(f"a range has at most {_MAX_LEVELS} levels")
