"""What ``ctypes.CDLL("libcuda.so.1")``, or ``PyDLL``, gives: the few functions of the driver that have no
place in the runtime's interface. ``install`` puts it in the place of that one library.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Final

from cuda_simulation import errors, sharing
from cuda_simulation.context import current, entry
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.virtual_memory import GRANULARITY

NAMES: Final = ("libcuda.so.1", "libcuda.so")
#: The second keeps the interpreter's lock during calls.
_LOADERS: Final = ("CDLL", "PyDLL")
_real_cdll: Any = ctypes.CDLL


class _Function:
    """A function of the library. ``argtypes`` and ``restype`` may be set, as with ctypes' own."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.argtypes: Any = None
        self.restype: Any = ctypes.c_int

    def __call__(self, *args: Any) -> int:
        return self._call(*args)


class Library:
    """The driver's library."""

    def __init__(self) -> None:
        self.cuInit = _Function(_init)
        self.cuGetErrorString = _Function(_error_string)
        self.cuGetErrorName = _Function(_error_name)
        self.cuMemGetAddressRange_v2 = _Function(_address_range)
        self.cuDriverGetVersion = _Function(_version)
        self.cuThreadExchangeStreamCaptureMode = _Function(_exchange_capture_mode)
        self.cuEventQuery = _Function(_query_event)
        self.cuIpcOpenMemHandle_v2 = _Function(_open_memory)
        self.cuIpcCloseMemHandle = _Function(_close_memory)
        self.cuDeviceGet = _Function(_device)
        self.cuDeviceGetAttribute = _Function(_attribute)
        self.cuDeviceGetUuid_v2 = _Function(_uuid)
        self.cuMemGetAllocationGranularity = _Function(_granularity)
        self.cuMemCreate = _Function(_create)
        self.cuMemExportToShareableHandle = _Function(_export)
        self.cuMemImportFromShareableHandle = _Function(_import)
        self.cuMemRelease = _Function(_release)
        self.cuMemAddressReserve = _Function(_reserve)
        self.cuMemAddressFree = _Function(_free_addresses)
        self.cuMemMap = _Function(_map)
        self.cuMemSetAccess = _Function(_set_access)
        self.cuMemUnmap = _Function(_unmap)


def install() -> None:
    """Have ctypes give the stand-in for the driver's library, and the real one for all others."""
    if ctypes.CDLL is _real_cdll:
        library = Library()
        for name in _LOADERS:
            setattr(ctypes, name, _opening(getattr(ctypes, name), library))


def _opening(real: Any, library: Library) -> Any:
    class Opened(real):  # type: ignore[misc]
        def __new__(cls, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
            if name not in NAMES:
                return super().__new__(cls)
            if current().view.now.driver_version is None:
                raise OSError(f"{name}: cannot open shared object file: No such file or directory")
            return library

    Opened.__name__ = Opened.__qualname__ = real.__name__
    return Opened


def _init(_flags: Any) -> int:
    return current().init_failure or (0 if current().devices else errors.NO_DEVICE)


def _address_range(base: Any, nbytes: Any, address: Any) -> int:
    context = current()
    if not context.thread.has_context:
        return errors.DEVICE_UNINITIALIZED
    if context.scheduler.failure:
        return context.scheduler.failure
    found = context.addresses.around(int(getattr(address, "value", address) or 0))
    if found is None:
        return errors.NOT_FOUND
    _put(base, found.address)
    _put(nbytes, found.nbytes)
    return 0


def _open_memory(address: Any, handle: Any, flags: Any) -> int:
    """The handle is a structure, which comes by value."""
    return _in_context(lambda: _put(address, _opened(bytes(handle), int(flags.value))))


def _close_memory(address: Any) -> int:
    return _in_context(lambda: _closed(int(address.value)))


@entry("ipcOpenMemHandle")
def _opened(handle: bytes, flags: int) -> int:
    return sharing.open_memory(current(), handle, flags)


@entry("ipcCloseMemHandle")
def _closed(address: int) -> None:
    sharing.close_memory(current(), address)


def _in_context(call: Callable[[], None]) -> int:
    if not current().thread.has_context:
        return errors.DEVICE_UNINITIALIZED
    try:
        call()
    except CUDARuntimeError as error:
        return error.status
    return 0


# ---- virtual memory management -------------------------------------------------------------------

#: ``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED``, and that of handles that are descriptors.
_OF_VIRTUAL_MEMORY: Final = (102, 103)
#: ``CU_MEM_ALLOCATION_TYPE_PINNED``, ``CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR``,
#: ``CU_MEM_LOCATION_TYPE_DEVICE``.
_PINNED, _DESCRIPTOR, _ON_DEVICE = 1, 1, 1


def _device(device: Any, ordinal: Any) -> int:
    if not 0 <= _number(ordinal) < len(current().devices):
        return errors.INVALID_DEVICE
    _put(device, _number(ordinal))
    return 0


def _attribute(value: Any, attribute: Any, device: Any) -> int:
    if _number(attribute) not in _OF_VIRTUAL_MEMORY:
        return errors.INVALID_VALUE
    _put(value, int(current().view.gpu(current().devices[_number(device)].uuid).virtual_memory))
    return 0


def _uuid(target: Any, device: Any) -> int:
    text = current().devices[_number(device)].uuid.partition("-")[2]
    ctypes.memmove(target._obj, bytes.fromhex(text.replace("-", "")), 16)
    return 0


def _granularity(target: Any, prop: Any, _option: Any) -> int:
    return _asked_of("cuMemGetAllocationGranularity", lambda: _put(target, (_checked(prop), GRANULARITY)[1]))


def _create(handle: Any, nbytes: Any, prop: Any, _flags: Any) -> int:
    memory = current().virtual_memory
    return _asked_of("cuMemCreate", lambda: _put(handle, memory.create(_checked(prop), _number(nbytes))))


def _checked(prop: Any) -> int:
    """The ordinal of a device in a ``CUmemAllocationProp`` of memory that can be exported."""
    kind, handles, place, ordinal = struct.unpack_from("<4i", bytes(prop._obj))
    if (kind, handles, place) != (_PINNED, _DESCRIPTOR, _ON_DEVICE):
        raise CUDARuntimeError(errors.INVALID_VALUE)
    return int(ordinal)


def _export(target: Any, handle: Any, kind: Any, _flags: Any) -> int:
    if _number(kind) != _DESCRIPTOR:
        return errors.INVALID_VALUE
    memory = current().virtual_memory
    return _asked_of("cuMemExportToShareableHandle", lambda: _put(target, memory.export(_number(handle))))


def _import(handle: Any, fd: Any, kind: Any) -> int:
    if _number(kind) != _DESCRIPTOR:
        return errors.INVALID_VALUE
    memory = current().virtual_memory
    return _asked_of("cuMemImportFromShareableHandle", lambda: _put(handle, memory.open(_number(fd))))


def _release(handle: Any) -> int:
    return _asked_of("cuMemRelease", lambda: current().virtual_memory.release(_number(handle)))


def _reserve(target: Any, nbytes: Any, _alignment: Any, _wanted: Any, _flags: Any) -> int:
    memory = current().virtual_memory
    return _asked_of("cuMemAddressReserve", lambda: _put(target, memory.reserve(_number(nbytes))))


def _free_addresses(address: Any, nbytes: Any) -> int:
    memory = current().virtual_memory
    return _asked_of("cuMemAddressFree", lambda: memory.free(_number(address), _number(nbytes)))


def _map(address: Any, nbytes: Any, offset: Any, handle: Any, _flags: Any) -> int:
    if _number(offset):
        return errors.INVALID_VALUE
    memory = current().virtual_memory
    return _asked_of("cuMemMap", lambda: memory.map(_number(address), _number(nbytes), _number(handle)))


def _set_access(address: Any, nbytes: Any, description: Any, count: Any) -> int:
    place, ordinal, access = struct.unpack_from("<3i", bytes(description._obj))
    if (place, _number(count)) != (_ON_DEVICE, 1):
        return errors.INVALID_VALUE
    memory = current().virtual_memory
    return _asked_of(
        "cuMemSetAccess", lambda: memory.set_access(_number(address), _number(nbytes), ordinal, access)
    )


def _unmap(address: Any, nbytes: Any) -> int:
    memory = current().virtual_memory
    return _asked_of("cuMemUnmap", lambda: memory.unmap(_number(address), _number(nbytes)))


def _asked_of(name: str, call: Callable[[], None]) -> int:
    return _in_context(entry(name)(call))


def _number(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)


def _query_event(event: Any) -> int:
    return _in_context(lambda: _asked(int(getattr(event, "value", event))))


@entry("eventQuery", keeps_lock=True)
def _asked(event: int) -> None:
    if not current().events.get(event).done:
        raise CUDARuntimeError(errors.NOT_READY)


def _version(version: Any) -> int:
    _put(version, current().view.now.cuda_version)
    return 0


def _exchange_capture_mode(mode: Any) -> int:
    thread, wanted = current().thread, mode._obj.value
    _put(mode, thread.capture_mode)
    thread.capture_mode = wanted
    return 0


def _error_string(status: Any, text: Any) -> int:
    return _text(status, text, lambda name, words: words)


def _error_name(status: Any, text: Any) -> int:
    return _text(status, text, lambda name, words: name.replace("cudaError", "CUDA_ERROR_"))


def _text(status: Any, target: Any, chosen: Callable[[str, str], str]) -> int:
    known = errors.WORDS.get(int(getattr(status, "value", status)))
    if known is None:
        return errors.INVALID_VALUE
    _put(target, chosen(*known).encode())
    return 0


def _put(pointer: Any, value: Any) -> None:
    """Through a ``byref`` or a ``pointer``; NULL is allowed."""
    if pointer is not None:
        target = getattr(pointer, "_obj", None)
        (pointer.contents if target is None else target).value = value
