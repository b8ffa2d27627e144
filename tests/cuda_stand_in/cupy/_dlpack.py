"""DLPack between arrays of the stand-in. The capsule is an object of Python: nothing outside can read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from cupy.cuda.device import Device
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
        return _taken(_asked_of(array, get_current_stream().ptr or _LEGACY_STREAM, copy))


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
