"""What became of the calls of one process, counted between two looks at it. Pure: times are arguments.

Durations are kept to a thousandth of themselves, as counts of equal values: a second of many thousand calls
is a few hundred numbers on its way to the process that makes the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuserve.bench.calls import Call, Failure

#: Durations in nanoseconds, each with how often it was met.
Counted = tuple[list[int], list[int]]
NONE: Counted = ([], [])


@dataclass(frozen=True)
class Interval:
    """What one process counted in a stretch of time.

    ``completed`` calls and ``responses`` are those that came in this time. The durations are of calls that
    were answered, whenever they came: ``latencies`` from the due time to the end of a call, ``first`` to its
    first response, ``gaps`` between two responses of one call, ``lags`` from the due time to the sending.
    ``waited`` is how long those have waited that were not answered when the measurement ended.
    """

    duration_s: float
    cpu_s: float
    sent: int
    completed: int
    responses: int
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    latencies: Counted = NONE
    first: Counted = NONE
    gaps: Counted = NONE
    lags: Counted = NONE
    waited: Counted = NONE


class Samples:
    """The calls of the stretch under way. ``counting`` is off while they belong to a warm-up."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._sent = self._completed = self._responses = 0
        self._failures: dict[str, tuple[int, str]] = {}
        self._latencies: list[float] = []
        self._first: list[float] = []
        self._gaps: list[float] = []
        self._lags: list[float] = []
        self._waited: list[float] = []

    def sent(self, lag_s: float) -> None:
        """One more call, sent so late."""
        self._sent += 1
        self._lags.append(lag_s)

    def gap(self, gap_s: float) -> None:
        """A response that is not the first of its call."""
        self._gaps.append(gap_s)

    def responded(self) -> None:
        """A response that came while the level was measured."""
        self._responses += 1

    def answered(self, call: Call, now: float, *, in_time: bool) -> None:
        """A call that ended well; ``in_time``: before the measurement was over."""
        self._completed += in_time
        self._latencies.append(now - call.due_s)
        if call.responses:
            self._first.append(call.first_s - call.due_s)

    def completed_earlier(self) -> None:
        """A call that was sent in the warm-up and ended in the measurement: throughput, no latency."""
        self._completed += 1

    def failed(self, failure: Failure) -> None:
        """A call that ended badly."""
        count, text = self._failures.get(failure.kind, (0, failure.text))
        self._failures[failure.kind] = count + 1, text

    def waited(self, so_far_s: float) -> None:
        """A call that had no answer when the measurement was over."""
        self._waited.append(so_far_s)

    def take(self, duration_s: float, cpu_s: float) -> Interval:
        """What there is since the last time."""
        taken = Interval(
            duration_s,
            cpu_s,
            self._sent,
            self._completed,
            self._responses,
            self._failures,
            *map(counted, (self._latencies, self._first, self._gaps, self._lags, self._waited)),
        )
        self._clear()
        return taken


def counted(durations_s: Sequence[float]) -> Counted:
    """Durations rounded to three digits and counted."""
    if not durations_s:
        return NONE
    ns = np.maximum(np.asarray(durations_s) * 1e9, 1.0)
    unit = 10.0 ** np.maximum(np.floor(np.log10(ns)) - 3, 0)
    values, counts = np.unique((np.rint(ns / unit) * unit).astype(np.int64), return_counts=True)
    return values.tolist(), counts.tolist()
