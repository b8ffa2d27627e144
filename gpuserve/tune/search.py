"""Which settings are tried next: along one axis at a time, from the best so far, until no step is better.

Pure. The throughput of a server over one of these settings mostly has one hill: larger batches pay until they
do not. Steps are to the neighbours on an axis, so few trials are wasted far away from it. The same scores
lead to the same trials.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final, TypeAlias

#: A position on each axis.
Position: TypeAlias = tuple[int, ...]

#: A step is better when it gives so much more: less is noise.
MARGIN: Final = 1.03


def coordinate_search(sizes: Sequence[int], start: Position) -> Generator[Position, float, Position]:
    """Yields positions to try and is sent their scores; returns the best.

    Args:
        sizes: how many values each axis has.
    """
    known: dict[Position, float] = {}

    def score(position: Position) -> Generator[Position, float, float]:
        if position not in known:
            known[position] = yield position
        return known[position]

    best = start
    yield from score(start)
    moved = True
    while moved:
        moved = False
        for axis, size in enumerate(sizes):
            for step in (1, -1):
                while 0 <= best[axis] + step < size:
                    tried = (*best[:axis], best[axis] + step, *best[axis + 1 :])
                    yield from score(tried)
                    if not is_better(known[tried], known[best]):
                        break
                    best, moved = tried, True
    return best


def is_better(new: float, old: float) -> bool:
    """Whether a score is above another by more than noise. Scores below 0 are of settings over the limit."""
    return new > old * MARGIN if old > 0 else new > old / MARGIN
