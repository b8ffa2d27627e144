"""Which GPUs a process sees, in which order: ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .machine import Gpu, Machine, Mig


@dataclass(frozen=True)
class Device:
    """A device of CUDA: a GPU, or a MIG instance of one. ``uuid`` is that of the GPU or of the instance."""

    uuid: str
    gpu_uuid: str
    memory: int


def visible(machine: Machine, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices of a process, by ordinal."""
    gpus = _ordered(machine, environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST"))
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return _only_one_mig([device for gpu in gpus for device in _devices(gpu)])
    return _only_one_mig(list(_chosen(gpus, listed.split(","))))


def _ordered(machine: Machine, order: str) -> list[Gpu]:
    by_bus = sorted((gpu for gpu in machine.gpus if not gpu.lost), key=lambda gpu: gpu.pci_bus_id)
    return by_bus if order == "PCI_BUS_ID" else sorted(by_bus, key=lambda gpu: -gpu.speed)


def _chosen(gpus: list[Gpu], entries: list[str]) -> Iterator[Device]:
    """What is listed, up to the first entry that names nothing, or names a thing twice."""
    seen: set[str] = set()
    for entry in entries:
        device = _named(gpus, entry.strip())
        if device is None or device.uuid in seen:
            return
        seen.add(device.uuid)
        yield device


def _named(gpus: list[Gpu], entry: str) -> Device | None:
    if entry.isdecimal():
        devices = _devices(gpus[int(entry)]) if int(entry) < len(gpus) else []
        return devices[0] if devices else None
    if entry.startswith("MIG-"):
        named = [_instance(gpu, one) for gpu in gpus for one in gpu.mig if one.uuid == entry]
    else:
        found = [gpu for gpu in gpus if len(entry) > len("GPU-") and gpu.uuid.startswith(entry)]
        named = [device for gpu in found for device in _devices(gpu)[:1]]
    return named[0] if len(named) == 1 else None


def _devices(gpu: Gpu) -> list[Device]:
    """With MIG there are the instances only."""
    if gpu.mig:
        return [_instance(gpu, one) for one in gpu.mig]
    return [Device(gpu.uuid, gpu.uuid, gpu.memory)]


def _instance(gpu: Gpu, mig: Mig) -> Device:
    return Device(mig.uuid, gpu.uuid, mig.memory)


def _only_one_mig(devices: list[Device]) -> tuple[Device, ...]:
    """CUDA uses one MIG instance in a process, and then no other GPU."""
    mig = [device for device in devices if device.uuid.startswith("MIG-")]
    return tuple(mig[:1] or devices)
