"""How much of what a worker prints and reports is logged. Pure: the time is an argument (seconds of a
monotonic clock).
"""

from __future__ import annotations

import math
from typing import Final

#: What may come at once, in seconds of the rate: a traceback, the report of a library that is loaded.
BURST_S: Final = 10.0
_UNLIMITED: Final = float(1 << 60)


class OutputRate:
    """Two buckets, of lines and of bytes, which fill at these rates; 0 is no limit."""

    def __init__(self, lines_per_s: float, nbytes_per_s: float) -> None:
        self._rates = (lines_per_s or _UNLIMITED, nbytes_per_s or _UNLIMITED)
        self._left = [rate * BURST_S for rate in self._rates]
        self._filled_at = -math.inf

    def is_spent(self, now: float) -> bool:
        elapsed_s, self._filled_at = now - self._filled_at, now
        for each, rate in enumerate(self._rates):
            self._left[each] = min(self._left[each] + elapsed_s * rate, rate * BURST_S)
        return min(self._left) < 1

    def spend(self, nbytes: int) -> None:
        """Count a line. It may be longer than what is left; what comes after it waits for that."""
        self._left[0] -= 1
        self._left[1] -= nbytes
