"""Reads the models and the GPUs of one front, a model in a step, so that requests have their turns in
between. Nothing runs by itself here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuserve.front.batching.saturation import saturation
from gpuserve.front.live.rows import Row, gpu_row, model_row, point_of, short, unloaded_row
from gpuserve.front.models.interface import Driver
from gpuserve.front.observe.gpu_health.watch import GpuWatch
from gpuserve.front.observe.history import NO_POINTS, History
from gpuserve.front.observe.rates import NOTHING, ModelCounts, ModelRates, Of, RateMeter, rates_of, together
from gpuserve.front.service.model_table import ModelTable

#: In the history, of all models together.
ALL: Final = ("", "")
_PAGE_NBYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Sample(NamedTuple):
    """Everything at one moment: a row for each version of each model by name and version, the rates of all
    of them together, and the GPUs.
    """

    models: dict[Of, Row]
    total: Row
    gpus: list[Row]


class LiveSampler:
    """Reads a server's models, each time what happened since the time before; ``clock`` gives seconds."""

    def __init__(self, models: ModelTable, gpus: GpuWatch, clock: Callable[[], float]) -> None:
        self.history = History()
        self._models = models
        self._gpus = gpus
        self._clock = clock
        self._meter = RateMeter()
        self._meter_of_points = RateMeter()
        #: The memory of workers by process id, as of the last point.
        self._nbytes: dict[int, int] = {}

    def restart(self) -> None:
        """Let the next sample tell what happened since the last point: nobody has looked since long ago."""
        self._meter = self._meter_of_points.copy()

    def history_of(self, of: Of) -> dict[str, Any] | None:
        """The points of a model, or of ``ALL``; none of one that has just come. None: there is no such."""
        known = of == ALL or any((one.name, one.version) == of for one in self._models.index())
        return self.history.document(of) or (NO_POINTS if known else None)

    def sampling(self) -> Generator[None, None, Sample]:
        """Read everything; what it returns is of the end of it."""
        drivers = _by_version(self._models.all())
        rows: dict[Of, Row] = {}
        total = _Total()
        for entry in self._models.index():
            yield
            of = entry.name, entry.version
            if of not in drivers:
                rows[of] = unloaded_row(entry)
                continue
            rates = total.add(*self._meter.counted(drivers[of].metrics, self._clock()))
            attached = self._models.is_attached(entry.name)
            rows[of] = model_row(entry, drivers[of], rates, attached=attached, nbytes=self._nbytes)
        self._meter.keep(drivers)
        gpus = [gpu_row(one) for one in self._gpus.document()["gpus"]]
        return Sample(rows, total.row(), gpus)

    def taking_point(self, time_of_day: float) -> Generator[None, None, None]:
        """Add a point to the history, and look how much memory workers have."""
        drivers = _by_version(self._models.all())
        points: dict[Of, list[float | None]] = {}
        nbytes: dict[int, int] = {}
        total, queued = _Total(), 0
        for of, driver in drivers.items():
            yield
            rates = total.add(*self._meter_of_points.counted(driver.metrics, self._clock()))
            counts = driver.statistics()
            queued += counts.queued
            points[of] = point_of(counts.queued, saturation(driver.spec, counts), rates)
            if driver.workers is not None:
                nbytes |= {link.pid: _nbytes_of(link.pid) for link in driver.workers.instances.up.values()}
        self._meter_of_points.keep(drivers)
        self._nbytes = nbytes
        points[ALL] = point_of(queued, None, total.rates())
        self.history.add(time_of_day, points)


class _Total:
    """What all models have counted in one reading; the times since their last ones are about the same."""

    def __init__(self) -> None:
        self._counted: ModelCounts = NOTHING
        self._elapsed_s = 0.0

    def add(self, counted: ModelCounts, elapsed_s: float) -> ModelRates:
        """Add what one model has counted, and return its rates."""
        self._counted = together(self._counted, counted)
        if math.isfinite(elapsed_s):
            self._elapsed_s = max(self._elapsed_s, elapsed_s)
        return rates_of(counted, elapsed_s)

    def rates(self) -> ModelRates:
        return rates_of(self._counted, self._elapsed_s or 1.0)

    def row(self) -> Row:
        return {name: short(value) for name, value in self.rates()._asdict().items() if name != "instances"}


def _by_version(drivers: list[Driver]) -> dict[Of, Driver]:
    return {(one.spec.name, str(one.spec.version)): one for one in drivers}


def _nbytes_of(pid: int) -> int:
    """The resident memory of a process; 0 for one that has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_NBYTES
    except (OSError, ValueError, IndexError):
        return 0
