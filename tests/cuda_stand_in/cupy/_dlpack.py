"""DLPack between arrays of the stand-in, whose capsules are objects of Python that nothing outside can read,
and from torch's tensors of the CPU that stand for those on a GPU (``torch_on_stand_in``), whose capsules are
real.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from cuda_simulation.adopted import Adopted

from cupy.cuda.device import Device
from cupy.cuda.memory import MemoryPointer, UnownedMemory
from cupy.cuda.stream import ExternalStream, get_current_stream

CPU: Final = 1
CUDA: Final = 2
_LEGACY_STREAM: Final = 1
_NO_SYNC: Final = -1


@dataclass
class PyCapsule:
    """An array on its way; it can be taken once."""

    array: Any
    used: bool = False


def export(array: Any, stream: int | None, copy: bool | None) -> PyCapsule:
    """The consumer's stream waits for the current one; None is the legacy default stream, -1 no wait."""
    array = array.copy() if copy else array
    if stream != _NO_SYNC:
        current = get_current_stream()
        wanted = _LEGACY_STREAM if stream is None else stream
        if wanted != (current.ptr or _LEGACY_STREAM):
            ExternalStream(wanted).wait_event(current.record())
    return PyCapsule(array)


def from_dlpack(array: Any, *, device: Any = None, copy: bool | None = None) -> Any:
    """The array of a producer, without a copy, safe to use on the current stream."""
    if not hasattr(array, "__dlpack_device__"):
        return _taken(array)
    kind, device_id = array.__dlpack_device__()
    if device is not None:
        raise NotImplementedError("from_dlpack() does not support device yet.")
    if kind == CPU:
        raise TypeError(
            "CPU arrays cannot be directly imported to CuPy. "
            "Use `cupy.array(numpy.from_dlpack(input))` instead."
        )
    if kind != CUDA:
        raise TypeError(f"Unsupported array type: {kind}")
    with Device(device_id):
        capsule = _asked_of(array, get_current_stream().ptr or _LEGACY_STREAM, copy)
        return _taken(capsule) if isinstance(capsule, PyCapsule) else _adopted(capsule, device_id)


@dataclass
class _Producer:
    """Who gives numpy a real capsule of the CPU."""

    capsule: Any

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


def _adopted(capsule: Any, device_id: int) -> Any:
    from cupy._array import ndarray

    host = np.from_dlpack(_Producer(capsule))
    memory = Adopted(host)
    pointer = MemoryPointer(UnownedMemory(memory.address, memory.nbytes, memory, device_id), memory.offset)
    return ndarray(host.shape, host.dtype, pointer, host.strides)


def _asked_of(producer: Any, stream: int, copy: bool | None) -> Any:
    try:
        return producer.__dlpack__(stream=stream, max_version=(1, 0), copy=copy)
    except TypeError:  # a producer from before the version
        if copy is not None:
            raise
        return producer.__dlpack__(stream=stream)


def _taken(capsule: Any) -> Any:
    if not isinstance(capsule, PyCapsule) or capsule.used:
        raise ValueError(
            "A DLPack tensor object cannot be consumed multiple times "
            f"(or object was not a DLPack capsule). Got: {capsule!r}"
        )
    capsule.used = True
    return capsule.array._viewed(lambda one: one)
