"""The report of ``gpuserve devices``, as data and as text: the GPUs and the placement of models. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpuserve.cli.live.status_view import table_lines
from gpuserve.devices.inventory import NOT_INSTALLED, Inventory, missing_gpu_reason
from gpuserve.devices.machine import EXCLUSIVE, Gpu, MigInstance
from gpuserve.devices.names import VARIABLE
from gpuserve.model.placement import Cupy
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.execution.lifecycle import ranges

_EXTRAS: Final = "pip install 'gpuserve[cuda12]' or 'gpuserve[cuda13]'"
_UNKNOWN: Final = "-"
_HEAD: Final = ("Device", "Name", "Memory free", "NUMA", "CPUs", "Compute mode", "UUID")
_MODEL_HEAD: Final = ("Model", "Instance", "Device", "UUID")
_GIB: Final = 1 << 30


def inventory_as_json(
    inventory: Inventory, cupy: Cupy | None, models: Sequence[ModelSpec] | None
) -> dict[str, Any]:
    """Return the inventory as a JSON object; ``models`` are placed, or None without a config."""
    machine = inventory.machine
    driver = machine.driver
    facts: dict[str, Any] = {
        "driver": None if driver is None else driver.version or None,
        "cuda": None if driver is None else driver.cuda_version or None,
        "cuda_visible_devices": inventory.variable,
        "cupy": None if cupy is None else {"version": cupy.version or None, "cuda": cupy.cuda_major or None},
        "devices": inventory.names(),
        "gpus": [_gpu_as_json(gpu, inventory) for gpu in machine.gpus],
        "notes": list(device_notes(inventory, cupy)),
    }
    if models is not None:
        columns = ("model", "instance", "device", "uuid")
        facts["instances"] = [dict(zip(columns, row, strict=True)) for row in _placements(models)]
    return facts


def inventory_as_text(inventory: Inventory, cupy: Cupy | None, models: Sequence[ModelSpec] | None) -> str:
    """Return the inventory as text; ``models`` are placed, or None without a config."""
    lines = [device_headline(inventory, cupy)]
    if inventory.machine.gpus:
        lines += ["", *table_lines(_HEAD, _gpu_rows(inventory))]
    if found := list(device_notes(inventory, cupy)):
        lines += ["", *found]
    if models is not None:
        lines += ["", *table_lines(_MODEL_HEAD, _placements(models))]
    return "\n".join(lines) + "\n"


def device_notes(inventory: Inventory, cupy: Cupy | None) -> Iterator[str]:
    """Yield a sentence for each missing part and each unusual setting."""
    machine = inventory.machine
    if not inventory.devices:
        yield f"no GPU can be used: {missing_gpu_reason(inventory)}"
    elif inventory.variable is not None:
        yield f"{VARIABLE} is {inventory.variable!r}; it excludes the GPUs without a device name"
    if machine.shortage == NOT_INSTALLED:
        yield f"{NOT_INSTALLED}, so memory and MIG instances of GPUs are unknown: {_EXTRAS}"
    elif machine.shortage and inventory.devices:
        yield machine.shortage
    if cupy is None:
        yield f"cupy is not installed, so inputs cannot be passed on a GPU: {_EXTRAS}"
    elif machine.driver is not None and cupy.cuda_major:
        served = machine.driver.cuda_version
        if served and int(cupy.cuda_major) > int(served.partition(".")[0]):
            yield f"cupy is for CUDA {cupy.cuda_major}, but this driver serves CUDA {served}"
    for device in inventory.devices:
        if device.gpu.compute_mode == EXCLUSIVE:
            mode = f"{device.name} is in compute mode {EXCLUSIVE!r}"
            yield f"{mode}: without MPS only one process at a time can use it"


def device_headline(inventory: Inventory, cupy: Cupy | None) -> str:
    """Return the versions of the driver and of cupy in a few words."""
    driver = inventory.machine.driver
    if driver is None:
        text = "no NVIDIA driver"
    else:
        cuda = f", CUDA {driver.cuda_version}" if driver.cuda_version else ""
        text = f"NVIDIA driver {driver.version or 'of unknown version'}{cuda}"
    if cupy is None:
        return f"{text}, no cupy"
    made_for = f" for CUDA {cupy.cuda_major}" if cupy.cuda_major else ""
    return f"{text}, cupy {cupy.version}".rstrip() + made_for


def _gpu_rows(inventory: Inventory) -> Iterator[tuple[str, ...]]:
    for gpu in inventory.machine.gpus:
        memory = _memory_text(gpu.free_nbytes, gpu.memory_nbytes)
        node = str(gpu.numa_node) if gpu.numa_node >= 0 else _UNKNOWN
        beside = (node, ranges(gpu.cpus) or _UNKNOWN, gpu.compute_mode or _UNKNOWN)
        name = "MIG mode" if gpu.in_mig_mode else _device_name(gpu, None, inventory) or _UNKNOWN
        yield name, gpu.name or _UNKNOWN, memory, *beside, gpu.uuid or _UNKNOWN
        for one in gpu.mig:
            device = _device_name(gpu, one, inventory) or _UNKNOWN
            memory = _memory_text(one.free_nbytes, one.memory_nbytes)
            yield device, "  MIG instance", memory, "", "", "", one.uuid


def _device_name(gpu: Gpu, mig: MigInstance | None, inventory: Inventory) -> str | None:
    """Return the device name of a GPU or MIG instance, or None if ``CUDA_VISIBLE_DEVICES`` excludes it."""
    return next((one.name for one in inventory.devices if one.gpu is gpu and one.mig is mig), None)


def _memory_text(free_nbytes: int | None, total_nbytes: int | None) -> str:
    if free_nbytes is None or total_nbytes is None:
        return _UNKNOWN
    return f"{free_nbytes / _GIB:.1f} of {total_nbytes / _GIB:.1f} GiB"


def _gpu_as_json(gpu: Gpu, inventory: Inventory) -> dict[str, Any]:
    return {
        "index": gpu.number,
        "device": None if gpu.in_mig_mode else _device_name(gpu, None, inventory),
        "uuid": gpu.uuid or None,
        "name": gpu.name or None,
        "pci_bus_id": gpu.bus_id or None,
        "memory_total_nbytes": gpu.memory_nbytes,
        "memory_free_nbytes": gpu.free_nbytes,
        "numa_node": gpu.numa_node if gpu.numa_node >= 0 else None,
        "cpus": list(gpu.cpus),
        "compute_mode": gpu.compute_mode or None,
        "mig_mode": gpu.in_mig_mode,
        "mig_instances": [
            {
                "device": _device_name(gpu, one, inventory),
                "uuid": one.uuid,
                "memory_total_nbytes": one.memory_nbytes,
                "memory_free_nbytes": one.free_nbytes,
            }
            for one in gpu.mig
        ],
    }


def _placements(models: Sequence[ModelSpec]) -> list[tuple[str, ...]]:
    instances = ((one.name, it) for one in models for it in one.instances)
    return [(model, it.name, it.device, ", ".join(it.placement.gpu_uuids)) for model, it in instances]
