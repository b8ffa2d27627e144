"""GPU metrics under Triton's names and our own, and the JSON of ``GET /v2/gpus``. Pure.

Old readings are left out, because an old value would be taken for a new one. The state is always included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.devices.machine import SLOWDOWNS, GpuReading
from gpuserve.front.observability.gpu_health.gpu_states import GpuState, WatchedGpu
from gpuserve.front.observability.metrics.prometheus import Family, family

#: Field of a ``GpuReading``, Triton's name after "nv_" ("" for none), our name after "gpuserve_gpu_", and
#: help text. Names with "_total" are counters, others gauges.
_FIGURES: Final = (
    ("utilization", "gpu_utilization", "utilization_ratio", "Part of the time that the GPU worked, 0 to 1"),
    ("memory_total_nbytes", "gpu_memory_total_bytes", "memory_total_bytes", "Memory of the GPU in bytes"),
    ("memory_used_nbytes", "gpu_memory_used_bytes", "memory_used_bytes", "Memory of the GPU in use in bytes"),
    ("power_w", "gpu_power_usage", "power_watts", "Power that the GPU draws in watts"),
    ("power_limit_w", "gpu_power_limit", "power_limit_watts", "Power that the GPU may draw in watts"),
    (
        "energy_j",
        "energy_consumption",
        "energy_joules_total",
        "Energy that the GPU has used in joules, since its driver was loaded",
    ),
    ("temperature_c", "", "temperature_celsius", "Temperature of the GPU in degrees Celsius"),
    (
        "retired_pages_pending",
        "",
        "retired_pages_pending",
        "1 while pages of the GPU's memory are to be retired at its next reset",
    ),
    (
        "remapped_rows.pending",
        "",
        "row_remap_pending",
        "1 while rows of the GPU's memory are to be replaced at its next reset",
    ),
    (
        "remapped_rows.failed",
        "",
        "row_remap_failed",
        "1 where a row of the GPU's memory could not be replaced",
    ),
)


class ModelMemory(NamedTuple):
    """The memory of one model version's workers on one GPU."""

    model: str
    version: str
    uuid: str
    device: str
    nbytes: int


def gpu_families(gpus: Iterable[WatchedGpu], models: Iterable[ModelMemory], age_s: float) -> Iterator[Family]:
    """Yield the metrics of all GPUs. ``age_s`` is the age of the NVML readings."""
    gpus = list(gpus)
    readings = [(one, one.reading) for one in gpus if one.reading is not None]
    for path, at_triton, here, text in _FIGURES:
        kind = "counter" if here.endswith("_total") else "gauge"
        values = [
            (one, value) for one, reading in readings if (value := _reading_value(reading, path)) is not None
        ]
        if at_triton:
            found = [({"gpu_uuid": one.uuid}, value) for one, value in values]
            yield family(f"nv_{at_triton}", kind, text, found)
        yield family(f"gpuserve_gpu_{here}", kind, text, [(_labels(one), value) for one, value in values])
    for name, label, kind, text, parts in _BY_LABEL:
        counts = [
            ({**_labels(one), label: part}, n) for one in gpus for part, n in parts(one) if n is not None
        ]
        yield family(f"gpuserve_gpu_{name}", kind, text, counts)
    text = "Seconds since NVML last answered"
    yield family("gpuserve_gpu_reading_age_seconds", "gauge", text, [({}, age_s)] if gpus else [])
    memory = [
        ({"model": one.model, "version": one.version, "gpu_uuid": one.uuid, "device": one.device}, one.nbytes)
        for one in models
    ]
    text = "Memory that the model's workers have on the GPU in bytes"
    yield family("gpuserve_model_gpu_memory_bytes", "gauge", text, memory)


def _reading_value(reading: GpuReading, path: str) -> float | None:
    found: Any = reading
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return int(found) if isinstance(found, bool) else found


def _labels(gpu: WatchedGpu) -> dict[str, str]:
    return {"gpu_uuid": gpu.uuid, "device": gpu.device}


_Parts: TypeAlias = Iterable[tuple[str, float | None]]


def _states(gpu: WatchedGpu) -> _Parts:
    return [(state.value.lower(), int(gpu.life.state is state)) for state in GpuState]


def _ecc_errors(gpu: WatchedGpu) -> _Parts:
    one = gpu.reading
    return [] if one is None else [("corrected", one.ecc_corrected), ("uncorrected", one.ecc_uncorrected)]


def _slowdowns(gpu: WatchedGpu) -> _Parts:
    now = None if gpu.reading is None else gpu.reading.slowdowns
    return [] if now is None else [(reason, int(reason in now)) for reason in SLOWDOWNS.values()]


def _remapped_rows(gpu: WatchedGpu) -> _Parts:
    rows = None if gpu.reading is None else gpu.reading.remapped_rows
    return [] if rows is None else [("corrected", rows.corrected), ("uncorrected", rows.uncorrected)]


#: Metrics with several values a GPU: name after "gpuserve_gpu_", label, kind, help text, and values.
_BY_LABEL: Final[Sequence[tuple[str, str, str, str, Callable[[WatchedGpu], _Parts]]]] = (
    ("state", "state", "gauge", "1 for the state that the GPU is in, 0 for the others", _states),
    (
        "ecc_errors_total",
        "kind",
        "counter",
        "Errors of the GPU's memory since its driver was loaded",
        _ecc_errors,
    ),
    (
        "remapped_rows",
        "kind",
        "gauge",
        "Rows of the GPU's memory that were replaced, by the kind of error",
        _remapped_rows,
    ),
    ("slowdown", "reason", "gauge", "1 while the GPU runs slower than it could, for this reason", _slowdowns),
    (
        "xid_errors_total",
        "xid",
        "counter",
        "Errors that the GPU's driver reported, by their Xid",
        lambda gpu: [(str(number), count) for number, count in sorted(gpu.xids.items())],
    ),
)


# ---- JSON ---------------------------------------------------------------------------------------


def gpus_document(
    gpus: Iterable[WatchedGpu], models: Iterable[ModelMemory], age_s: float, stale: bool
) -> dict[str, Any]:
    """Return the body of ``GET /v2/gpus``. Unreported values are null; ``age_s`` is the readings' age."""
    memory = list(models)
    return {
        "stale": stale,
        "age_seconds": None if math.isinf(age_s) else round(age_s, 3),
        "gpus": [_gpu_document(one, [each for each in memory if each.uuid == one.uuid]) for one in gpus],
    }


def _gpu_document(gpu: WatchedGpu, models: Iterable[ModelMemory]) -> dict[str, Any]:
    return {
        "uuid": gpu.uuid,
        "device": gpu.device,
        "name": gpu.product,
        "state": gpu.life.state.value,
        "reason": gpu.life.reason,
        "reading": _reading_document(gpu),
        "xid_errors": {str(number): count for number, count in sorted(gpu.xids.items())},
        "models": [{"name": one.model, "version": one.version, "memory_bytes": one.nbytes} for one in models],
    }


def _reading_document(gpu: WatchedGpu) -> dict[str, Any] | None:
    one = gpu.reading
    if one is None:
        return None
    return {
        "memory_total_bytes": one.memory_total_nbytes,
        "memory_used_bytes": one.memory_used_nbytes,
        "utilization": one.utilization,
        "temperature_celsius": one.temperature_c,
        "power_watts": one.power_w,
        "power_limit_watts": one.power_limit_w,
        "energy_joules": one.energy_j,
        "ecc_errors_corrected": one.ecc_corrected,
        "ecc_errors_uncorrected": one.ecc_uncorrected,
        "remapped_rows": None if one.remapped_rows is None else one.remapped_rows._asdict(),
        "retired_pages_pending": one.retired_pages_pending,
        "slowdowns": None if one.slowdowns is None else sorted(one.slowdowns),
    }
