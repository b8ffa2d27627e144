"""What came of a simulated run, as figures. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from benchmarks.scenarios.figures import percentile
from benchmarks.simulations.fronts import Answered, Run

#: The first part of a run fills queues, and is not counted.
_WARM_UP: Final = 0.2


class Outcome(NamedTuple):
    """``throughput_hz`` counts what was answered while requests still came, ``busiest`` is the part of its
    CPU that the busiest front used, and ``quiet_p99_s`` the p99 of the front with the fewest requests.
    """

    throughput_hz: float
    p50_s: float
    p99_s: float
    mean_rows: float
    busiest: float
    quiet_p99_s: float


def outcome(run: Run) -> Outcome:
    """The figures of a run with at least one request after the warm-up.

    Raises:
        ValueError: there is none.
    """
    end_s = max(one.arrived_at_s for one in run.answered)
    begin_s = end_s * _WARM_UP
    counted = [one for one in run.answered if one.arrived_at_s >= begin_s]
    in_time = sum(begin_s <= one.answered_at_s < end_s for one in run.answered)
    rows = [rows for at, rows in run.batches if begin_s <= at < end_s]
    quiet = min(Counter(one.front for one in counted).items(), key=lambda item: item[1])[0]
    return Outcome(
        throughput_hz=in_time / (end_s - begin_s),
        p50_s=_latency(counted, 50),
        p99_s=_latency(counted, 99),
        mean_rows=sum(rows) / len(rows) if rows else 0.0,
        busiest=max(run.busy_s) / max(one.answered_at_s for one in run.answered),
        quiet_p99_s=_latency([one for one in counted if one.front == quiet], 99),
    )


def _latency(answered: list[Answered], percent: float) -> float:
    return percentile([one.answered_at_s - one.arrived_at_s for one in answered], percent)
