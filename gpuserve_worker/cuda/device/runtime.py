"""The CUDA runtime as a worker uses it, with plain numbers as arguments and one kind of exception
(``CudaError``). The only module that imports cupy. Every blocking method releases the GIL.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeVar

from gpuserve_worker.inference.failure import DeviceFailure

_Class = TypeVar("_Class")

#: The stream on which frameworks compute by default; other blocking streams wait for it.
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
#: Errors after which nothing works in the process any more (the CUDA runtime's documentation of
#: ``cudaError``: "leaves the process in an inconsistent state", or a device that is gone).
_STICKY: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999})
#: ``cudaErrorMps…``: the MPS server is gone, or ended this client because of another one.
_OF_MPS: Final = range(805, 812)
DRIVER: Final = "libcuda.so.1"


class CudaUnavailable(Exception):
    """CUDA is not available. The text names the missing part in one sentence."""


class CudaError(DeviceFailure):
    """An error that CUDA returned. ``code`` is the ``cudaError`` number; the text is CUDA's own."""

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
        """True if this process can no longer use its device."""
        return self.code in _STICKY

    @property
    def is_from_outside(self) -> bool:
        """True if no work of this process caused the error."""
        return self.code in _OF_MPS


class _Handle(ctypes.Structure):
    """The struct ``CUipcMemHandle``, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_NBYTES),)


class Copy(enum.IntEnum):
    """The direction of a copy; the values are those of ``cudaMemcpyKind``."""

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


#: The calls of each batch, which translate errors by themselves: a wrapper costs as much as the call.
_FREQUENT: Final = frozenset({"__init__", "copy", "is_complete", "record", "stream_wait_event", "use_device"})


def _all_raising(cls: type[_Class]) -> type[_Class]:
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and name not in _FREQUENT:
            setattr(cls, name, _raising(method))
    return cls


@_all_raising
class Runtime:
    """CUDA in this process: one method for each call; addresses, streams and events are numbers.

    ``query_event`` is the driver's ``cuEventQuery``. The runtime would keep "not ready" as the thread's last
    error, which a library that shares the runtime takes for the error of its next kernel.
    """

    def __init__(self, cupy: Any, driver: Any, query_event: Callable[[int], int]) -> None:
        self.cupy = cupy
        self._cuda = cupy.cuda.runtime
        self._driver = driver
        self._query_event = query_event
        self._error = cupy.cuda.runtime.CUDARuntimeError
        #: The size of each allocation of this class, by address.
        self._allocated: dict[int, int] = {}
        #: The limit of ``process_nbytes``, 0 without one.
        self.limit_nbytes = 0

    # ---- the device -----------------------------------------------------------------------

    def device_count(self) -> int:
        return int(self._cuda.getDeviceCount())

    def use_device(self, number: int) -> None:
        """Select a device in the calling thread, and initialise it at the first call."""
        try:
            self._cuda.setDevice(number)
        except self._error as error:
            raise CudaError(error.status, str(error)) from None

    def current_device(self) -> int:
        return int(self._cuda.getDevice())

    def tolerate_captures(self) -> None:
        """Let this thread work during captures of others; else its waits and allocations break them."""
        mode = ctypes.c_int(_RELAXED)
        status = int(self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        if status:
            raise CudaError(
                status, f"the driver does not let a thread tolerate captures (CUDA error {status})"
            )

    def synchronize(self) -> None:
        """Wait for all work of this process on the device. Raise its errors."""
        self._cuda.deviceSynchronize()

    def memory_nbytes(self) -> tuple[int, int]:
        free, total = self._cuda.memGetInfo()
        return int(free), int(total)

    def limit_memory(self, nbytes: int) -> None:
        """Limit the memory of cupy's pool on each device of this process, and that of ``allocate``."""
        self.limit_nbytes = nbytes
        for number in range(self.device_count()):
            with self.cupy.cuda.Device(number):
                self.cupy.get_default_memory_pool().set_limit(size=nbytes)

    def process_nbytes(self) -> int:
        """Return the device memory of this process, as far as its allocators know: not the CUDA context."""
        pool = self.cupy.get_default_memory_pool().total_bytes()
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        of_torch = cuda.memory_reserved() if cuda is not None and cuda.is_initialized() else 0
        return int(sum(list(self._allocated.values())) + pool + of_torch)

    # ---- memory ---------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        self.check_limit(nbytes)
        address = int(self._cuda.malloc(nbytes))
        self.count(address, nbytes)
        return address

    def free(self, address: int) -> None:
        self.count(address, 0)
        self._cuda.free(address)

    def check_limit(self, nbytes: int) -> None:
        """Raise ``CudaError`` if the limit of this process leaves no ``nbytes``."""
        if self.limit_nbytes and self.process_nbytes() + nbytes > self.limit_nbytes:
            text = f"no {nbytes} bytes are left of the {self.limit_nbytes} that gpu_memory_nbytes allows"
            raise CudaError(_OUT_OF_MEMORY, text)

    def count(self, address: int, nbytes: int) -> None:
        """Count memory at an address in ``process_nbytes``; 0: the memory is not there any more."""
        if nbytes:
            self._allocated[address] = nbytes
        else:
            self._allocated.pop(address, None)

    def page_lock(self, address: int, nbytes: int) -> None:
        """Lock host pages in memory, so that copies from and to them need no staging."""
        self._cuda.hostRegister(address, nbytes, 0)

    def page_unlock(self, address: int) -> None:
        self._cuda.hostUnregister(address)

    def copy(self, to: int, source: int, nbytes: int, kind: Copy, stream: int) -> None:
        """Enqueue a copy in the stream. Returns at once if the host's pages are locked."""
        try:
            self._cuda.memcpyAsync(to, source, nbytes, kind, stream)
        except self._error as error:
            raise CudaError(error.status, str(error)) from None

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        self._cuda.memsetAsync(address, 0, nbytes, stream)

    def address_range(self, address: int) -> tuple[int, int]:
        """Return the start and the size of the allocation that contains a device address."""
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
        """Create a stream that is not synchronised with the default stream."""
        return int(self._cuda.streamCreateWithFlags(self._cuda.streamNonBlocking))

    def synchronize_stream(self, stream: int) -> None:
        self._cuda.streamSynchronize(stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Order later work of the stream after the event's last recording. The host does not block."""
        try:
            self._cuda.streamWaitEvent(stream, event)
        except self._error as error:
            raise CudaError(error.status, str(error)) from None

    def destroy_stream(self, stream: int) -> None:
        self._cuda.streamDestroy(stream)

    def create_event(self, *, timing: bool = False) -> int:
        flags = self._cuda.eventBlockingSync
        if not timing:
            flags |= self._cuda.eventDisableTiming
        return int(self._cuda.eventCreateWithFlags(flags))

    def record(self, event: int, stream: int) -> None:
        try:
            self._cuda.eventRecord(event, stream)
        except self._error as error:
            raise CudaError(error.status, str(error)) from None

    def is_complete(self, event: int) -> bool:
        """Return whether an event is complete. Raise errors of the work before it."""
        status = self._query_event(event)
        if status not in (_SUCCESS, _NOT_READY):
            self._check(status)
        return status == _SUCCESS

    def wait(self, event: int) -> None:
        """Block the host until an event is complete. Raise errors of the work before it."""
        self._cuda.eventSynchronize(event)

    def elapsed_ns(self, start: int, end: int) -> int:
        """Return the nanoseconds between two complete events with timing."""
        return int(self._cuda.eventElapsedTime(start, end) * 1e6)

    def destroy_event(self, event: int) -> None:
        self._cuda.eventDestroy(event)

    # ---- other processes ------------------------------------------------------------------

    def export_memory(self, address: int) -> bytes:
        """Return the ``cudaIpcMemHandle_t`` (64 bytes) of the whole allocation at this address."""
        return bytes(self._cuda.ipcGetMemHandle(address))

    # Called by ctypes, which releases the GIL: these driver calls take milliseconds, in which cupy keeps the
    # GIL.

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
        """Raise the driver's error, whose numbers are those of the runtime."""
        if status:
            raise self._cuda.CUDARuntimeError(int(status))


class Events:
    """A cache of CUDA events for any thread, because creating one costs more than recording it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Operations on a deque are atomic; a lock could be requested inside a garbage collection.
        self._plain: deque[int] = deque()
        self._timing: deque[int] = deque()

    def acquire(self, *, timing: bool = False) -> int:
        try:
            return (self._timing if timing else self._plain).popleft()
        except IndexError:
            return self._runtime.create_event(timing=timing)

    def release_event(self, event: int, *, timing: bool = False) -> None:
        (self._timing if timing else self._plain).append(event)

    def close(self) -> None:
        for free in (self._plain, self._timing):
            while free:
                self._runtime.destroy_event(free.popleft())


class Progress:
    """The progress of the default stream as far as it is known, for any thread. Work that is enqueued now is
    complete when ``completed`` has reached ``next_ticket``; no call of CUDA is needed to ask.
    """

    def __init__(self, runtime: Runtime, events: Events) -> None:
        self._runtime = runtime
        self._events = events
        self._lock = threading.Lock()
        self._issued = 0
        #: The last ticket whose work is known to be complete.
        self.completed = 0
        #: The ticket and the event of ``poll``.
        self._polled: tuple[int, int] | None = None

    @property
    def next_ticket(self) -> int:
        return self._issued + 1

    def record(self, event: int) -> int:
        """Record an event in the default stream. Return the ticket of the work before it."""
        with self._lock:
            # First: a thread that asks for the next ticket meanwhile gets one that is recorded later.
            self._issued += 1
            self._runtime.record(event, DEFAULT_STREAM)
            return self._issued

    def complete(self, ticket: int) -> None:
        """Note that the event of a ticket, or of a later one, is complete."""
        self.completed = max(self.completed, ticket)

    def poll(self) -> None:
        """Ask CUDA for the progress. Raise errors of earlier work."""
        if self._polled is None:
            event = self._events.acquire()
            self._polled = self.record(event), event
        ticket, event = self._polled
        if self._runtime.is_complete(event):
            self._polled = None
            self._events.release_event(event)
            self.complete(ticket)


def load_runtime() -> Runtime:
    """Load CUDA by cupy, opening no device; raise ``CudaUnavailable`` without cupy or driver."""
    try:
        import cupy
    except ImportError as error:
        raise CudaUnavailable(
            f"cupy cannot be imported ({error}): expected gpuserve[cuda12] or gpuserve[cuda13] installed"
        ) from None
    try:
        driver = ctypes.CDLL(DRIVER)
        query_event = ctypes.PyDLL(DRIVER).cuEventQuery  # too short a call to release the GIL
    except OSError:
        raise CudaUnavailable("there is no NVIDIA driver: libcuda.so.1 was not found") from None
    query_event.argtypes = [ctypes.c_void_p]
    if timeline := os.environ.get("GPUSERVE_CUDA_TIMELINE"):
        return TimedRuntime(cupy, driver, query_event, timeline)
    return Runtime(cupy, driver, query_event)


_KINDS: Final = {Copy.HOST_TO_DEVICE: "h2d", Copy.DEVICE_TO_HOST: "d2h", Copy.DEVICE_TO_DEVICE: "d2d"}


class _TimedCopy(NamedTuple):
    """A copy of ``nbytes``, issued at ``issued_ns`` between the events ``start`` and ``end``."""

    kind: str
    stream: int
    nbytes: int
    issued_ns: int
    start: int
    end: int


class TimedRuntime(Runtime):
    """A runtime that writes the times of copies and calls, on the device's clock, to a file: for profiles,
    not for service. Any thread may use it.

    ``load_runtime`` returns it if the environment variable ``GPUSERVE_CUDA_TIMELINE`` has a file name, to
    which each worker appends its process id. Each line is JSON, written after the event: ``kind`` (h2d, d2h,
    d2d; or call, the time that the worker measured between two events), ``stream``, ``nbytes``, ``start_ns``
    and ``end_ns`` on the device, and ``issued_ns`` on the host, all relative to the same origin.
    """

    def __init__(self, cupy: Any, driver: Any, query_event: Callable[[int], int], file: str) -> None:
        super().__init__(cupy, driver, query_event)
        self._file = f"{file}.{os.getpid()}"
        self._lock = threading.Lock()
        self._copies: deque[_TimedCopy] = deque()
        #: Events with timing: the host's time of the recording, and the stream.
        self._recorded: dict[int, tuple[int, int]] = {}
        self._origin: int | None = None
        self._origin_ns = 0

    def copy(self, to: int, source: int, nbytes: int, kind: Copy, stream: int) -> None:
        with self._lock:
            issued_ns, start = self._now_ns(), self._mark(stream)
            super().copy(to, source, nbytes, kind, stream)
            self._copies.append(
                _TimedCopy(_KINDS[kind], stream, nbytes, issued_ns, start, self._mark(stream))
            )
            self._write_copies()

    def create_event(self, *, timing: bool = False) -> int:
        event = super().create_event(timing=timing)
        if timing:
            with self._lock:
                self._recorded[event] = self._now_ns(), -1
        return event

    def record(self, event: int, stream: int) -> None:
        super().record(event, stream)
        if event in self._recorded:
            self._recorded[event] = time.perf_counter_ns() - self._origin_ns, stream

    def elapsed_ns(self, start: int, end: int) -> int:
        """Return the elapsed time as ``Runtime``, and write a call: an interval on the default stream."""
        took_ns = super().elapsed_ns(start, end)
        (issued_ns, stream), (_, end_stream) = self._recorded[start], self._recorded[end]
        if stream == end_stream == DEFAULT_STREAM:
            with self._lock:
                self._write("call", stream, 0, issued_ns, start, took_ns)
        return took_ns

    def _now_ns(self) -> int:
        """Return the nanoseconds since the origin, which the first call sets while the device is idle."""
        if self._origin is None:
            self._origin = self._mark(DEFAULT_STREAM)
            self.wait(self._origin)
            self._origin_ns = time.perf_counter_ns()
        return time.perf_counter_ns() - self._origin_ns

    def _mark(self, stream: int) -> int:
        event = super().create_event(timing=True)
        super().record(event, stream)
        return event

    def _write_copies(self) -> None:
        try:
            while self._copies and self.is_complete(self._copies[0].end):
                one = self._copies.popleft()
                took_ns = super().elapsed_ns(one.start, one.end)
                self._write(one.kind, one.stream, one.nbytes, one.issued_ns, one.start, took_ns)
                self.destroy_event(one.start)
                self.destroy_event(one.end)
        except CudaError:
            self._copies.clear()  # the device is lost, which its users detect

    def _write(self, kind: str, stream: int, nbytes: int, issued_ns: int, start: int, took_ns: int) -> None:
        assert self._origin is not None, "what is written was issued after the origin"
        start_ns = super().elapsed_ns(self._origin, start)
        line = {
            "kind": kind,
            "stream": stream,
            "nbytes": nbytes,
            "issued_ns": issued_ns,
            "start_ns": start_ns,
            "end_ns": start_ns + took_ns,
        }
        with open(self._file, "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")
