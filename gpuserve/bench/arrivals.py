"""When the requests of an open loop are due, in seconds since its start. Pure; made from a seed."""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator


class Arrivals(enum.Enum):
    """How the requests of a rate are spread over time."""

    POISSON = "poisson"  #: independent of each other, as those of many users are
    CONSTANT = "constant"  #: at equal distances


def due_times(arrivals: Arrivals, rate_per_s: float, seed: int, phase: float = 0.0) -> Iterator[float]:
    """The times without end.

    Args:
        phase: 0 up to 1, how far into its first interval a constant rate begins: several processes
            that share a rate do not send at the same moment.
    """
    if arrivals is Arrivals.CONSTANT:
        return ((number + phase) / rate_per_s for number in itertools.count())
    source = random.Random(seed)
    return itertools.accumulate(source.expovariate(rate_per_s) for _ in itertools.count())
