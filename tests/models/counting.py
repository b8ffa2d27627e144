"""Models that keep metrics of their own."""

from __future__ import annotations

import os
import signal
from typing import Any

from gpuserve.decorators import batch
from gpuserve.metrics import MetricFamily

#: A request with this value in it kills whichever worker runs it.
POISON = -13.0


class Counting:
    """Counts rows, their values, and sets a gauge to the last."""

    def __init__(self, bounds: list[float]) -> None:
        rows = MetricFamily("counting_rows_total", "Rows \\ that\ncame.", MetricFamily.COUNTER)
        self.rows = rows.metric({"model": "counting"})
        self.loads = rows.metric({"model": "loads"})
        self.loads.increment()
        self.last = MetricFamily("counting_last", "The last value.", MetricFamily.GAUGE).metric()
        self.last.set(-1)
        values = MetricFamily("counting_values", "All values.", MetricFamily.HISTOGRAM)
        self.values = values.metric({"of": 'a "model"'}, bounds)

    @batch
    def __call__(self, x: Any) -> Any:
        if (x == POISON).any():
            os.kill(os.getpid(), signal.SIGKILL)
        self.rows.increment(len(x))
        for value in x.ravel():
            self.values.observe(float(value))
            self.last.set(float(value))
        return {"y": x}


async def awaiting(requests: Any) -> Any:
    family = MetricFamily("awaiting_total", "Requests of a callable that awaits.", MetricFamily.COUNTER)
    family.metric().increment(len(requests))
    return [{"y": one["x"]} for one in requests]


def conflicting(requests: Any) -> Any:
    """Has a family of the same name as another model, of another kind."""
    MetricFamily("counting_last", "Not a gauge here.", MetricFamily.COUNTER).metric().increment()
    MetricFamily("counting_values_sum", "In a histogram's way.", MetricFamily.COUNTER).metric().increment()
    MetricFamily("conflicting_total", "Fits in.", MetricFamily.COUNTER).metric().increment()
    return [{"y": one["x"]} for one in requests]
