"""Quantiles of the latest requests' latencies, for the summaries of the metrics page. Pure; kept only where
the server is told to.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
#: Requests older than this count no more, nor those before the latest so many.
WINDOW_S: Final = 60.0
WINDOW_REQUESTS: Final = 8192


class Latencies(NamedTuple):
    """Where the time of one request went, in nanoseconds."""

    request: float
    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float


class LatencyWindow:
    """The latest requests of one model. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, Latencies]] = deque(maxlen=WINDOW_REQUESTS)

    def observe(self, now: float, latencies: Latencies) -> None:
        """A request was answered now."""
        self._latest.append((now, latencies))

    def quantiles(self, now: float) -> dict[str, list[float]]:
        """For each field of ``Latencies`` its ``QUANTILES``; NaN while there was no request in the window."""
        latest = self._latest
        while latest and latest[0][0] < now - WINDOW_S:
            latest.popleft()
        columns = zip(*[one for _, one in latest], strict=True) if latest else [()] * len(Latencies._fields)
        return {
            name: _quantiles(sorted(column)) for name, column in zip(Latencies._fields, columns, strict=True)
        }


def _quantiles(ordered: list[float]) -> list[float]:
    """The nearest-rank quantiles of values in ascending order."""
    if not ordered:
        return [math.nan] * len(QUANTILES)
    return [ordered[math.ceil(quantile * len(ordered)) - 1] for quantile in QUANTILES]
