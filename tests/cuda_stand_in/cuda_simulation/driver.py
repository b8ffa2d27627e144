"""What ``ctypes.CDLL("libcuda.so.1")``, or ``PyDLL``, gives: the few functions of the driver that have no
place in the runtime's interface. ``install`` puts it in the place of that one library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from cuda_simulation import errors, sharing
from cuda_simulation.context import current, entry
from cuda_simulation.errors import CUDARuntimeError

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
