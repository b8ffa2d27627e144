"""The GPUs on the metrics page: under Triton's names, and under our own with what those do not tell. Pure.

What NVML did not say lately is not there: an old figure would be taken for a new one. The state always is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from gpuserve.front.gpu_health.fleet import Gpu
from gpuserve.front.gpu_health.health import GpuState
from gpuserve.front.gpu_health.readings import SLOWDOWNS, Reading
from gpuserve.front.triton_metrics import Family, sample


class _Figure(NamedTuple):
    """One metric of a GPU: its name at Triton ("" for none), its name here, and where it is in a reading."""

    at_triton: str
    name: str
    kind: str
    text: str
    value: Callable[[Reading], float | None]


_FIGURES: Final = (
    _Figure(
        "nv_gpu_utilization",
        "gpuserve_gpu_utilization_ratio",
        "gauge",
        "Part of the time that the GPU worked, 0 to 1",
        lambda one: one.utilization,
    ),
    _Figure(
        "nv_gpu_memory_total_bytes",
        "gpuserve_gpu_memory_total_bytes",
        "gauge",
        "Memory of the GPU in bytes",
        lambda one: one.memory_total_nbytes,
    ),
    _Figure(
        "nv_gpu_memory_used_bytes",
        "gpuserve_gpu_memory_used_bytes",
        "gauge",
        "Memory of the GPU in use in bytes",
        lambda one: one.memory_used_nbytes,
    ),
    _Figure(
        "nv_gpu_power_usage",
        "gpuserve_gpu_power_watts",
        "gauge",
        "Power that the GPU draws in watts",
        lambda one: one.power_w,
    ),
    _Figure(
        "nv_gpu_power_limit",
        "gpuserve_gpu_power_limit_watts",
        "gauge",
        "Power that the GPU may draw in watts",
        lambda one: one.power_limit_w,
    ),
    _Figure(
        "nv_energy_consumption",
        "gpuserve_gpu_energy_joules_total",
        "counter",
        "Energy that the GPU has used in joules, since its driver was loaded",
        lambda one: one.energy_j,
    ),
    _Figure(
        "",
        "gpuserve_gpu_temperature_celsius",
        "gauge",
        "Temperature of the GPU in degrees Celsius",
        lambda one: one.temperature_c,
    ),
    _Figure(
        "",
        "gpuserve_gpu_retired_pages_pending",
        "gauge",
        "1 while pages of the GPU's memory are to be retired at its next reset",
        lambda one: _flag(one.retired_pages_pending),
    ),
    _Figure(
        "",
        "gpuserve_gpu_row_remap_pending",
        "gauge",
        "1 while rows of the GPU's memory are to be replaced at its next reset",
        lambda one: _flag(one.remapped_rows and one.remapped_rows.pending),
    ),
    _Figure(
        "",
        "gpuserve_gpu_row_remap_failed",
        "gauge",
        "1 where a row of the GPU's memory could not be replaced",
        lambda one: _flag(one.remapped_rows and one.remapped_rows.failed),
    ),
)


class ModelMemory(NamedTuple):
    """What the workers of one version of a model have on one GPU."""

    model: str
    version: str
    uuid: str
    device: str
    nbytes: int


def gpu_families(gpus: Iterable[Gpu], models: Iterable[ModelMemory], age_s: float) -> Iterator[Family]:
    """The metrics of all GPUs; ``age_s`` is how old what NVML said is."""
    gpus = list(gpus)
    for figure in _FIGURES:
        if figure.at_triton:
            lines = _lines(figure.at_triton, figure, gpus, lambda one: {"gpu_uuid": one.uuid})
            yield Family(figure.at_triton, figure.kind, figure.text, lines)
    for figure in _FIGURES:
        yield Family(figure.name, figure.kind, figure.text, _lines(figure.name, figure, gpus, _labels))
    yield _states(gpus)
    yield _ecc_errors(gpus)
    yield _remapped_rows(gpus)
    yield _slowdowns(gpus)
    yield _xids(gpus)
    name, text = "gpuserve_gpu_reading_age_seconds", "Seconds since NVML last answered"
    yield Family(name, "gauge", text, [sample(name, {}, age_s)] if gpus else [])
    yield _of_models(models)


def _lines(
    name: str, figure: _Figure, gpus: Iterable[Gpu], labels: Callable[[Gpu], dict[str, str]]
) -> list[str]:
    values = [(one, figure.value(one.reading)) for one in gpus if one.reading is not None]
    return [sample(name, labels(one), value) for one, value in values if value is not None]


def _states(gpus: Iterable[Gpu]) -> Family:
    name = "gpuserve_gpu_state"
    lines = [
        sample(name, {**_labels(one), "state": state.value.lower()}, int(one.life.state is state))
        for one in gpus
        for state in GpuState
    ]
    return Family(name, "gauge", "1 for the state that the GPU is in, 0 for the others", lines)


def _ecc_errors(gpus: Iterable[Gpu]) -> Family:
    name = "gpuserve_gpu_ecc_errors_total"
    lines = [
        sample(name, {**_labels(one), "kind": kind}, count)
        for one, reading in _with_readings(gpus)
        for kind, count in (("corrected", reading.ecc_corrected), ("uncorrected", reading.ecc_uncorrected))
        if count is not None
    ]
    return Family(name, "counter", "Errors of the GPU's memory since its driver was loaded", lines)


def _remapped_rows(gpus: Iterable[Gpu]) -> Family:
    name = "gpuserve_gpu_remapped_rows"
    lines = [
        sample(name, {**_labels(one), "kind": kind}, getattr(reading.remapped_rows, kind))
        for one, reading in _with_readings(gpus)
        if reading.remapped_rows is not None
        for kind in ("corrected", "uncorrected")
    ]
    return Family(name, "gauge", "Rows of the GPU's memory that were replaced, by the kind of error", lines)


def _slowdowns(gpus: Iterable[Gpu]) -> Family:
    name = "gpuserve_gpu_slowdown"
    lines = [
        sample(name, {**_labels(one), "reason": reason}, int(reason in reading.slowdowns))
        for one, reading in _with_readings(gpus)
        if reading.slowdowns is not None
        for reason in SLOWDOWNS.values()
    ]
    return Family(name, "gauge", "1 while the GPU runs slower than it could, for this reason", lines)


def _xids(gpus: Iterable[Gpu]) -> Family:
    name = "gpuserve_gpu_xid_errors_total"
    lines = [
        sample(name, {**_labels(one), "xid": str(number)}, count)
        for one in gpus
        for number, count in sorted(one.xids.items())
    ]
    return Family(name, "counter", "Errors that the GPU's driver reported, by their Xid", lines)


def _of_models(models: Iterable[ModelMemory]) -> Family:
    name = "gpuserve_model_gpu_memory_bytes"
    lines = [
        sample(
            name,
            {"model": one.model, "version": one.version, "gpu_uuid": one.uuid, "device": one.device},
            one.nbytes,
        )
        for one in models
    ]
    return Family(name, "gauge", "Memory that the model's workers have on the GPU in bytes", lines)


def _with_readings(gpus: Iterable[Gpu]) -> list[tuple[Gpu, Reading]]:
    return [(one, one.reading) for one in gpus if one.reading is not None]


def _labels(gpu: Gpu) -> dict[str, str]:
    return {"gpu_uuid": gpu.uuid, "device": gpu.device}


def _flag(value: bool | None) -> int | None:
    return None if value is None else int(value)
