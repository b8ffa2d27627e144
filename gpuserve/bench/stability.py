"""Whether a level has shown what it is going to show. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

#: So many stretches of so many seconds must agree.
WINDOWS: Final = 3
WINDOW_S: Final = 1.0
_TOLERANCE: Final = 0.10


class Window(NamedTuple):
    """What a stretch of time gave."""

    throughput: float
    p50_ms: float
    p99_ms: float


def is_stable(windows: Sequence[Window], tolerance: float = _TOLERANCE) -> bool:
    """Whether throughput, median and p99 of the last windows are each within this part of their mean."""
    last = windows[-WINDOWS:]
    return len(last) == WINDOWS and all(_agree(values, tolerance) for values in zip(*last, strict=True))


def _agree(values: Sequence[float], tolerance: float) -> bool:
    mean = sum(values) / len(values)
    return mean > 0 and all(abs(value - mean) <= tolerance * mean for value in values)
