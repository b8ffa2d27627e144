"""How long a batch takes an instance of one model, by the last ones of about its size. Pure.

What is observed is what the worker says: inputs, call and outputs of one batch, without its way there and
back. It is looked at once a batch, never once a request.

For deadlines: a request that is taken at ``t`` cannot end before ``t + estimate(rows)``, where ``rows`` are
those of its batch; with its own rows, which are fewer, it is a lower bound. Where a size was not seen yet the
estimate is the least that it can be, if more rows never take less time, and no more for each row. Still it is
about the past: a model that has become quicker is known to be quicker only after it has run. So nobody is to
be refused by it while an instance is idle, or none would ever be tried again.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from typing import Final

#: So many batches of one size are remembered, and two of them may be outliers.
_REMEMBERED: Final = 5
#: A batch that took so much longer than expected is a surprise, and makes others likely.
_SURPRISE_S: Final = 1e-3
_STEADY: Final = 16
#: The first batch of a size is often slower than all others: caches fill, kernels are compiled.
_LEAST: Final = 2


class ServiceTime:
    """Medians of what batches took, by their size. Sizes that differ by less than a quarter are one."""

    def __init__(self) -> None:
        self._last: dict[int, deque[tuple[float, int]]] = {}
        #: By size, what the median batch took and its rows.
        self._medians: dict[int, tuple[float, int]] = {}
        #: The keys of the medians, in order.
        self._sizes: list[int] = []
        self._since_surprise = _STEADY

    @property
    def is_steady(self) -> bool:
        """Whether the last batches took hardly longer than was expected of them."""
        return self._since_surprise >= _STEADY

    def observe(self, rows: int, seconds: float) -> None:
        """Learn what a batch of so many rows took; one that failed says nothing."""
        size = rows if rows < 8 else _size(rows)
        last = self._last.get(size)
        if last is None:
            last = self._last[size] = deque(maxlen=_REMEMBERED)
        self._since_surprise += 1
        if size in self._medians and seconds > self._medians[size][0] + _SURPRISE_S:
            self._since_surprise = 0
        last.append((seconds, rows))
        if len(last) >= _LEAST:
            self._medians[size] = sorted(last)[(len(last) - 1) // 2]
            if len(self._medians) > len(self._sizes):
                self._sizes = sorted(self._medians)

    def estimate(self, rows: int) -> float | None:
        """Seconds from the begin of a batch of so many rows to its end; None while nothing is known."""
        median = self._medians.get(rows if rows < 8 else _size(rows))
        return self._between(rows) if median is None else median[0]

    def _between(self, rows: int) -> float | None:
        """The least that a batch of an unknown size can take, between those of known sizes."""
        if not self._sizes:
            return None
        place = bisect(self._sizes, _size(rows))
        below = self._medians[self._sizes[place - 1]] if place else (0.0, 0)
        if place == len(self._sizes):
            return below[0]
        above = self._medians[self._sizes[place]]
        part = (rows - below[1]) / (above[1] - below[1])
        return below[0] + max(0.0, above[0] - below[0]) * part


def _size(rows: int) -> int:
    """A number that grows with the rows, the same for those of three equal leading bits."""
    more = max(0, rows.bit_length() - 3)
    return (more << 2) + (rows >> more)
