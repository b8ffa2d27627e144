"""The calls of one process, counted between two reports. Pure: times are arguments. Durations are counts of
values rounded to a thousandth, a few hundred numbers a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuserve.bench.calls.call import Failure, TimedCall

#: Durations in nanoseconds, each with how often it was met.
CountedDurations = tuple[list[int], list[int]]
NONE: CountedDurations = ([], [])


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
    latencies: CountedDurations = NONE
    first: CountedDurations = NONE
    gaps: CountedDurations = NONE
    lags: CountedDurations = NONE
    waited: CountedDurations = NONE


class Samples:
    """Counts calls until ``take``, which begins anew."""

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
        """Count a call that was sent ``lag_s`` after it was due."""
        self._sent += 1
        self._lags.append(lag_s)

    def gap(self, gap_s: float) -> None:
        self._gaps.append(gap_s)

    def responded(self) -> None:
        """Count a response that came while the level was measured."""
        self._responses += 1

    def answered(self, call: TimedCall, now: float, *, in_time: bool) -> None:
        """Count a call that ended well; ``in_time`` is before the measurement was over."""
        self._completed += in_time
        self._latencies.append(now - call.due_s)
        if call.responses:
            self._first.append(call.first_s - call.due_s)

    def completed_earlier(self) -> None:
        """Count a call of the warm-up that ended in the measurement: as throughput, without a latency."""
        self._completed += 1

    def failed(self, failure: Failure) -> None:
        count, text = self._failures.get(failure.kind, (0, failure.text))
        self._failures[failure.kind] = count + 1, text

    def waited(self, so_far_s: float) -> None:
        """Count a call that had no answer when the measurement was over."""
        self._waited.append(so_far_s)

    def take(self, duration_s: float, cpu_s: float) -> Interval:
        """What was counted since the last ``take``."""
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


def counted(durations_s: Sequence[float]) -> CountedDurations:
    """Durations rounded to three digits, each with how often it occurs."""
    if not durations_s:
        return NONE
    ns = np.maximum(np.asarray(durations_s) * 1e9, 1.0)
    unit = 10.0 ** np.maximum(np.floor(np.log10(ns)) - 3, 0)
    values, counts = np.unique((np.rint(ns / unit) * unit).astype(np.int64), return_counts=True)
    return values.tolist(), counts.tolist()
