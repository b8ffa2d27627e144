"""The CUDA runtime as a worker uses it: plain numbers in, plain numbers out, and one kind of exception. The
only module that imports cupy. What is done with streams, events and memory is not decided here. Every method
that can wait lets other threads run meanwhile. Whatever uses CUDA may raise ``CudaError``.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
from collections import deque
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, TypeVar

from gpuserve_worker.calling.failure import DeviceFailure

_Class = TypeVar("_Class")

#: The stream on which frameworks compute unless told otherwise; others that may block wait for it.
DEFAULT_STREAM: Final = 0
#: ``CU_STREAM_CAPTURE_MODE_RELAXED``.
_RELAXED: Final = 2
#: ``cudaSuccess`` and ``cudaErrorNotReady``.
_SUCCESS: Final = 0
_NOT_READY: Final = 600
#: ``cudaErrorMemoryAllocation``.
_OUT_OF_MEMORY: Final = 2
#: Of a ``cudaIpcMemHandle_t``.
HANDLE_NBYTES: Final = 64
#: ``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``.
_LAZY_PEER_ACCESS: Final = 1
#: After these nothing works in the process any more (the CUDA runtime's documentation of ``cudaError``:
#: "leaves the process in an inconsistent state", or a device that is gone).
_STICKY: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999})


class CudaUnavailable(Exception):
    """There is no CUDA to work with. The text says what is missing, in one sentence."""


class CudaError(DeviceFailure):
    """CUDA refused. ``code`` is its ``cudaError`` number; the text is CUDA's own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> tuple[type[CudaError], tuple[int, str]]:
        return CudaError, (self.code, str(self))

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY

    @property
    def is_sticky(self) -> bool:
        """Whether this process can use its device no more."""
        return self.code in _STICKY


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_NBYTES),)


class Copy(enum.IntEnum):
    """The direction of a copy; the numbers are ``cudaMemcpyKind``."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


def _raising(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            code = getattr(error, "status", None)
            if code is None:
                raise
            raise CudaError(int(code), str(error)) from None

    return wrapped


def _all_raising(cls: type[_Class]) -> type[_Class]:
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and name != "__init__":
            setattr(cls, name, _raising(method))
    return cls


@_all_raising
class Runtime:
    """CUDA in this process, one method for each of its calls that is used; so there are more than twenty.
    Made by ``load_runtime``. Addresses, streams and events are plain numbers.
    """

    def __init__(self, cupy: Any, driver: Any) -> None:
        self.cupy = cupy
        self._cuda = cupy.cuda.runtime
        self._driver = driver

    # ---- the device -----------------------------------------------------------------------

    def device_count(self) -> int:
        return int(self._cuda.getDeviceCount())

    def use_device(self, number: int) -> None:
        """Make a device the current one of the calling thread, and open it where it is not yet."""
        self._cuda.setDevice(number)

    def tolerate_captures(self) -> None:
        """Let the calling thread go on while another one captures work into a graph: otherwise waiting for
        events and allocating fail meanwhile, and spoil the capture.
        """
        mode = ctypes.c_int(_RELAXED)
        status = int(self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        if status:
            raise CudaError(
                status, f"the driver does not let a thread tolerate captures (CUDA error {status})"
            )

    def synchronize(self) -> None:
        """Wait for all work of this process on the device; tells of whatever went wrong in it."""
        self._cuda.deviceSynchronize()

    def memory_nbytes(self) -> tuple[int, int]:
        free, total = self._cuda.memGetInfo()
        return int(free), int(total)

    # ---- memory ---------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        return int(self._cuda.malloc(nbytes))

    def free(self, address: int) -> None:
        self._cuda.free(address)

    def page_lock(self, address: int, nbytes: int) -> None:
        """Lock pages of the host in memory, so that copies from and to them need no staging."""
        self._cuda.hostRegister(address, nbytes, 0)

    def page_unlock(self, address: int) -> None:
        self._cuda.hostUnregister(address)

    def copy(self, to: int, source: int, nbytes: int, kind: Copy, stream: int) -> None:
        """Copy after what is in the stream already; returns at once where the host's pages are locked."""
        self._cuda.memcpyAsync(to, source, nbytes, int(kind), stream)

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        self._cuda.memsetAsync(address, 0, nbytes, stream)

    def address_range(self, address: int) -> tuple[int, int]:
        """Where the allocation that an address of the device is in begins, and how many bytes it has."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)
        )
        if status:
            raise CudaError(
                int(status), f"the driver knows no allocation at this address (CUDA error {status})"
            )
        return base.value, nbytes.value

    def device_of(self, address: int) -> int:
        return int(self._cuda.pointerGetAttributes(address).device)

    # ---- streams and events ---------------------------------------------------------------

    def create_stream(self) -> int:
        """A stream that neither waits for the default stream nor is waited for by it."""
        return int(self._cuda.streamCreateWithFlags(self._cuda.streamNonBlocking))

    def synchronize_stream(self, stream: int) -> None:
        self._cuda.streamSynchronize(stream)

    def stream_waits(self, stream: int, event: int) -> None:
        """Later work of the stream begins when the event, as last recorded, has come. The host goes on."""
        self._cuda.streamWaitEvent(stream, event)

    def destroy_stream(self, stream: int) -> None:
        self._cuda.streamDestroy(stream)

    def create_event(self, *, timing: bool = False) -> int:
        flags = self._cuda.eventBlockingSync
        if not timing:
            flags |= self._cuda.eventDisableTiming
        return int(self._cuda.eventCreateWithFlags(flags))

    def record(self, event: int, stream: int) -> None:
        self._cuda.eventRecord(event, stream)

    def has_come(self, event: int) -> bool:
        """Whether an event has come; raises what went wrong in the work before it."""
        status = int(self._cuda.eventQuery(event))  # which cupy gives, and does not raise
        if status not in (_SUCCESS, _NOT_READY):
            raise self._cuda.CUDARuntimeError(status)
        return status == _SUCCESS

    def wait(self, event: int) -> None:
        """Wait on the host for an event; raises what went wrong in the work before it."""
        self._cuda.eventSynchronize(event)

    def elapsed_ns(self, start: int, end: int) -> int:
        """Nanoseconds between two events with timing that have come."""
        return int(self._cuda.eventElapsedTime(start, end) * 1e6)

    def destroy_event(self, event: int) -> None:
        self._cuda.eventDestroy(event)

    # ---- other processes ------------------------------------------------------------------

    def export_memory(self, address: int) -> bytes:
        """The ``cudaIpcMemHandle_t`` (64 bytes) of the whole allocation at this address."""
        return bytes(self._cuda.ipcGetMemHandle(address))

    # By the driver: it takes milliseconds for these, in which cupy lets no other thread run, and ctypes does.

    def open_memory(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._check(
            self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        )
        return address.value

    def close_memory(self, address: int) -> None:
        """Close the allocation of another process, which keeps its memory."""
        self._check(self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address)))

    def _check(self, status: int) -> None:
        """Raise what the driver says, which has the runtime's numbers."""
        if status:
            raise self._cuda.CUDARuntimeError(int(status))


class Events:
    """CUDA events to be used again and again, by any thread: to make one costs more than to record it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Operations on a deque are atomic; a lock could be asked for in the middle of a collection.
        self._plain: deque[int] = deque()
        self._timing: deque[int] = deque()

    def take(self, *, timing: bool = False) -> int:
        try:
            return (self._timing if timing else self._plain).popleft()
        except IndexError:
            return self._runtime.create_event(timing=timing)

    def give(self, event: int, *, timing: bool = False) -> None:
        (self._timing if timing else self._plain).append(event)

    def close(self) -> None:
        for free in (self._plain, self._timing):
            while free:
                self._runtime.destroy_event(free.popleft())


def load_runtime() -> Runtime:
    """CUDA, by way of cupy; no device is opened. ``CudaUnavailable``: there is no cupy, or no driver."""
    try:
        import cupy
    except ImportError as error:
        raise CudaUnavailable(
            f"cupy cannot be imported ({error}): expected gpuserve[cuda12] or gpuserve[cuda13] installed"
        ) from None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise CudaUnavailable("there is no NVIDIA driver: libcuda.so.1 was not found") from None
    if timeline := os.environ.get("GPUSERVE_CUDA_TIMELINE"):
        from gpuserve_worker.cuda.device.timeline import TimedRuntime

        return TimedRuntime(cupy, driver, timeline)
    return Runtime(cupy, driver)
