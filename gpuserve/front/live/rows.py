"""A model, an instance or a GPU at one moment as plain data, as the live page is told them. Numbers are
short, so that what has hardly changed is told as the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpuserve.front.batching.saturation import saturation
from gpuserve.front.models.interface import Driver
from gpuserve.front.observe.rates import InstanceRates, ModelRates
from gpuserve.front.v2.types import IndexEntry
from gpuserve.model.spec import InstanceSpec

Row = dict[str, Any]


def model_row(
    entry: IndexEntry, driver: Driver, rates: ModelRates, *, attached: bool, nbytes: Mapping[int, int]
) -> Row:
    """One version of a model that gets requests; ``nbytes`` is the memory of workers by their process id."""
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
    """One version of a model, or a model none of whose versions is known, without any rates."""
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
        state, due_in_s = driver.workers.instances.standing(instance.name, time.monotonic())
        link = driver.workers.instances.up.get(instance.name)
        row |= {"state": state, "restart_in_s": due_in_s}
        if link is not None:
            row |= {"pid": link.pid, "memory_nbytes": nbytes.get(link.pid)}
    return row


def point_of(queued: int, part: float | None, rates: ModelRates) -> list[float | None]:
    """The values of one point of the history, in the order of its fields; ``part`` is the saturation."""
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
    """One GPU, of the document that ``GET /v2/gpus`` has."""
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
