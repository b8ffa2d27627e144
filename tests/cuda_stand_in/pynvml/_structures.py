"""What functions of NVML return that is no number and no text, with the fields of nvidia-ml-py."""

from __future__ import annotations

from dataclasses import dataclass


class c_nvmlDevice_t:
    """A handle of a GPU or of a MIG instance. Opaque, and equal to no other, as a pointer of ctypes is."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid


@dataclass
class Memory:
    """Bytes."""

    total: int
    free: int
    used: int
    version: int = 0
    reserved: int = 0


@dataclass
class Utilization:
    """Per cent."""

    gpu: int
    memory: int


@dataclass
class PciInfo:
    """The place on the bus."""

    busId: str
    domain: int
    bus: int
    device: int
    pciDeviceId: int = 0x233510DE
    pciSubSystemId: int = 0

    @property
    def busIdLegacy(self) -> str:
        """With four digits of the domain."""
        return self.busId[4:]


@dataclass
class ProcessInfo:
    """A process that uses the GPU, and its bytes."""

    pid: int
    usedGpuMemory: int
    gpuInstanceId: int = 0xFFFFFFFF
    computeInstanceId: int = 0xFFFFFFFF


@dataclass
class FieldContent:
    """A value, of which nvidia-ml-py has one attribute for each type."""

    uiVal: int


@dataclass
class FieldValue:
    """A field of a GPU; ``nvmlReturn`` is the code of what went wrong with it, or 0."""

    fieldId: int
    nvmlReturn: int
    value: FieldContent


@dataclass
class EventData:
    """An event of a GPU. ``eventData`` is the Xid where that is the type."""

    device: c_nvmlDevice_t
    eventType: int
    eventData: int
    gpuInstanceId: int = 0xFFFFFFFF
    computeInstanceId: int = 0xFFFFFFFF
