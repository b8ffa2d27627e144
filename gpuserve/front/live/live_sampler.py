"""The sampler of the live page: reads the models and the GPUs of one front, one model in a step, so that
other tasks run in between, and converts them to plain data.

Numbers are rounded, so that values that have hardly changed compare as equal.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuserve.front.models.model_driver import Driver
from gpuserve.front.observability.gpu_health.gpu_monitor import GpuWatch
from gpuserve.front.observability.metrics.rates import (
    NO_COUNTS,
    NO_POINTS,
    History,
    InstanceRates,
    ModelCounts,
    ModelKey,
    ModelRates,
    RateMeter,
    add_counts,
    rates_of,
)
from gpuserve.front.requests.inference import IndexEntry
from gpuserve.front.scheduling.scheduler import saturation
from gpuserve.front.service.model_table import ModelTable
from gpuserve.model.spec import InstanceSpec

#: The key of all models together in the history.
ALL: Final = ("", "")
_PAGE_NBYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Sample(NamedTuple):
    """A row for each model version, the rates of all models together, and the GPUs, at one moment."""

    models: dict[ModelKey, Row]
    total: Row
    gpus: list[Row]


class LiveSampler:
    """A reader of a server's models since its previous reading. ``clock`` returns seconds."""

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
        """Let the next sample start from the last point, since there were no subscribers for a long time."""
        self._meter = self._meter_of_points.copy()

    def history_of(self, of: ModelKey) -> dict[str, Any] | None:
        """Return the points of a model or of ``ALL``, empty for a new model, or None for an unknown one."""
        known = of == ALL or any((one.name, one.version) == of for one in self._models.index())
        return self.history.document(of) or (NO_POINTS if known else None)

    def sampling(self) -> Generator[None, None, Sample]:
        """Read everything in steps. The result is of the moment when the generator ends."""
        drivers = _by_version(self._models.all())
        rows: dict[ModelKey, Row] = {}
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
        self._meter.retain(drivers)
        gpus = [gpu_row(one) for one in self._gpus.document()["gpus"]]
        return Sample(rows, total.row(), gpus)

    def taking_point(self, time_of_day: float) -> Generator[None, None, None]:
        """Add a point to the history in steps, and read the memory of workers."""
        drivers = _by_version(self._models.all())
        points: dict[ModelKey, list[float | None]] = {}
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
        self._meter_of_points.retain(drivers)
        self._nbytes = nbytes
        points[ALL] = point_of(queued, None, total.rates())
        self.history.add(time_of_day, points)


class _Total:
    """The sum of all models' counts in one reading; the times since their last readings are about equal."""

    def __init__(self) -> None:
        self._counted: ModelCounts = NO_COUNTS
        self._elapsed_s = 0.0

    def add(self, counted: ModelCounts, elapsed_s: float) -> ModelRates:
        """Add the counts of a model, and return its rates."""
        self._counted = add_counts(self._counted, counted)
        if math.isfinite(elapsed_s):
            self._elapsed_s = max(self._elapsed_s, elapsed_s)
        return rates_of(counted, elapsed_s)

    def rates(self) -> ModelRates:
        return rates_of(self._counted, self._elapsed_s or 1.0)

    def row(self) -> Row:
        return {name: short(value) for name, value in self.rates()._asdict().items() if name != "instances"}


def _by_version(drivers: list[Driver]) -> dict[ModelKey, Driver]:
    return {(one.spec.name, str(one.spec.version)): one for one in drivers}


def _nbytes_of(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_NBYTES
    except (OSError, ValueError, IndexError):
        return 0


Row = dict[str, Any]


# ---- rows ----------------------------------------------------------------------------------------


def model_row(
    entry: IndexEntry, driver: Driver, rates: ModelRates, *, attached: bool, nbytes: Mapping[int, int]
) -> Row:
    """Return the row of a served model version; ``nbytes`` is the memory of workers by process id."""
    counts = driver.statistics()
    return {
        **unloaded_row(entry),
        "source": "program" if attached else "server",
        "max_batch_size": driver.spec.max_batch_size,
        "decoupled": driver.spec.decoupled,
        "is_ensemble": driver.spec.is_ensemble,
        "queued": counts.queued,
        "in_flight": counts.running_requests,
        "slots": counts.slots,
        "saturation": short(saturation(driver.spec, counts)),
        **{name: short(value) for name, value in rates._asdict().items() if name != "instances"},
        "failures": sum(driver.metrics.outcomes.failures.values()),
        "rejections": sum(driver.metrics.outcomes.rejections.values()),
        "instances": [_instance_row(one, driver, rates, nbytes) for one in driver.spec.instances],
    }


def unloaded_row(entry: IndexEntry) -> Row:
    """Return the row of a model version that is not served, or of a model without known versions."""
    state, reason = entry.state or "UNAVAILABLE", entry.reason or ("" if entry.state else "not loaded")
    return {"name": entry.name, "version": entry.version, "state": state, "reason": reason}


def _instance_row(
    instance: InstanceSpec, driver: Driver, rates: ModelRates, nbytes: Mapping[int, int]
) -> Row:
    metrics = driver.metrics.instance(instance.name)
    its_rates = rates.instances.get(instance.name, InstanceRates(0.0, 0.0))
    row: Row = {"name": instance.name, "device": instance.device, "restarts": metrics.restarts}
    row["batches_per_s"], row["busy"] = short(its_rates.batches_per_s), short(its_rates.busy)
    if driver.workers is not None:
        state, due_in_s = driver.workers.instances.state_of(instance.name, time.monotonic())
        link = driver.workers.instances.up.get(instance.name)
        row |= {"state": state, "restart_in_s": due_in_s}
        if link is not None:
            row |= {"pid": link.pid, "memory_nbytes": nbytes.get(link.pid)}
    return row


def point_of(queued: int, part: float | None, rates: ModelRates) -> list[float | None]:
    """Return the values of one history point in the order of its fields; ``part`` is the saturation."""
    return [
        rates.requests_per_s,
        rates.failures_per_s + rates.rejections_per_s,
        rates.batch_size,
        queued,
        part,
        rates.p50_s,
        rates.p99_s,
    ]


def gpu_row(gpu: Mapping[str, Any]) -> Row:
    """Return the row of a GPU from the document of ``GET /v2/gpus``."""
    reading = gpu["reading"] or {}
    return {
        **{name: gpu[name] for name in ("device", "uuid", "name", "state", "reason")},
        "utilization": reading.get("utilization"),
        "memory_used_nbytes": reading.get("memory_used_bytes"),
        "memory_nbytes": reading.get("memory_total_bytes"),
        "temperature_celsius": reading.get("temperature_celsius"),
        "power_watts": reading.get("power_watts"),
    }


def short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value else value
