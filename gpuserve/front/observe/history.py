"""The rates of models in the last minutes, a point every few seconds, in arrays of a fixed length: what one
takes is known (``NBYTES_OF_MODEL``), and nothing grows. Pure: times and values come in.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuserve.front.observe.rates import Of

#: What a point has, in this order; what there is nothing to tell of is NaN.
FIELDS: Final = (
    "requests_per_s",
    "failures_per_s",
    "batch_size",
    "queued",
    "saturation",
    "p50_s",
    "p99_s",
)
INTERVAL_S: Final = 5.0
POINTS: Final = 180
NBYTES_OF_MODEL: Final = POINTS * len(FIELDS) * array("f").itemsize
#: The document of what has not had a point yet.
NO_POINTS: Final[dict[str, Any]] = {
    "interval_s": INTERVAL_S,
    "times": [],
    "series": {field: [] for field in FIELDS},
}
_NOT_KNOWN: Final = (math.nan,) * len(FIELDS)


class History:
    """The last points of whatever is there now; what is not any more is forgotten at once."""

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._times = array("d", [0.0] * points)
        self._columns: dict[Of, array[float]] = {}
        #: How many points there have been.
        self._n = 0

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, time_s: float, rows: Mapping[Of, Sequence[float | None]]) -> None:
        """Take a point for each of these, at a time in seconds since 1970."""
        at, width = self._n % self._points, len(FIELDS)
        self._n += 1
        self._times[at] = time_s
        for gone in self._columns.keys() - rows.keys():
            del self._columns[gone]
        for of, row in rows.items():
            column = self._columns.get(of)
            if column is None:
                column = self._columns[of] = array("f", _NOT_KNOWN * self._points)
            column[at * width : (at + 1) * width] = array(
                "f", [math.nan if one is None else one for one in row]
            )

    def document(self, of: Of) -> dict[str, Any] | None:
        """The points of one of them by field, the oldest first; None: it is not known."""
        column = self._columns.get(of)
        if column is None:
            return None
        order = self._order()
        return {
            "interval_s": INTERVAL_S,
            "times": [round(self._times[at], 1) for at in order],
            "series": {
                field: [_told(column[at * len(FIELDS) + place]) for at in order]
                for place, field in enumerate(FIELDS)
            },
        }

    def _order(self) -> list[int]:
        """The places of the points, the oldest first."""
        if self._n <= self._points:
            return list(range(self._n))
        first = self._n % self._points
        return [*range(first, self._points), *range(first)]


def _told(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")
