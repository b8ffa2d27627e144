"""The body of ``GET /v2/gpus``: the GPUs as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from gpuserve.front.gpu_health.families import ModelMemory
from gpuserve.front.gpu_health.fleet import Gpu


def document(gpus: Iterable[Gpu], models: Iterable[ModelMemory], age_s: float, stale: bool) -> dict[str, Any]:
    """All GPUs. What a GPU does not tell is null, and so is all of what NVML said while it is lost or silent.

    ``age_s`` is how old what NVML said is, ``stale`` whether that is more than it should be.
    """
    memory = list(models)
    return {
        "stale": stale,
        "age_seconds": None if math.isinf(age_s) else round(age_s, 3),
        "gpus": [_gpu(one, [each for each in memory if each.uuid == one.uuid]) for one in gpus],
    }


def _gpu(gpu: Gpu, models: Iterable[ModelMemory]) -> dict[str, Any]:
    return {
        "uuid": gpu.uuid,
        "device": gpu.device,
        "name": gpu.product,
        "state": gpu.life.state.value,
        "reason": gpu.life.reason,
        "reading": _reading(gpu),
        "xid_errors": {str(number): count for number, count in sorted(gpu.xids.items())},
        "models": [{"name": one.model, "version": one.version, "memory_bytes": one.nbytes} for one in models],
    }


def _reading(gpu: Gpu) -> dict[str, Any] | None:
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
