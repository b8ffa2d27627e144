"""A worker's CUDA device: the runtime, the two streams of copies, and their memory. The device is opened once
in the life of a worker, before user code runs.

::

    h2d stream       inputs k+1 -> device
    default stream           the callable, batch k (and whatever it starts)
    d2h stream                       outputs k-1 -> arena

Streams wait for each other by events only, and the host waits only for the end of the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gpuserve_worker.cuda.device.arrays import Buffers, CudaArrays
from gpuserve_worker.cuda.device.host_memory import Background, HostMemory
from gpuserve_worker.cuda.device.ipc_memory import OF_THIS_PROCESS, ExportPool, OpenedHandles, Returns
from gpuserve_worker.cuda.device.runtime import (
    DEFAULT_STREAM,
    CudaError,
    Events,
    Progress,
    Runtime,
    load_runtime,
)

#: Device memory that is kept for inputs between batches: a part of the device, and at least this size. The
#: same amount may be used for outputs that other workers read, once they are requested.
_RETAINED_PART: Final = 16
_RETAINED_NBYTES: Final = 256 << 20
#: ``cudaErrorStreamCapture...``: errors of a graph that a thread of the callable is capturing.
_CAPTURE: Final = range(900, 909)


class CudaDevice:
    """A CUDA device, opened by ``open_device``. Any thread may use it. ``h2d`` and ``d2h`` are streams;
    ``progress`` is that of the default stream; ``buffers`` are device memory, ``host`` is host memory;
    ``exports`` are readable by other workers, ``opened`` and ``returns`` handle their exports.
    """

    def __init__(
        self,
        runtime: Runtime,
        number: int,
        h2d: int,
        d2h: int,
        retained_nbytes: int,
        lent_limit_nbytes: int,
        warn: Callable[[str], None],
        locked_limit_nbytes: int = 0,
    ) -> None:
        self.runtime = runtime
        self.number = number
        self.h2d = h2d
        self.d2h = d2h
        self.events = Events(runtime)
        self.progress = Progress(runtime, self.events)
        self.arrays = CudaArrays(runtime, self.events, number)
        self.buffers = Buffers(runtime, self.progress, retained_nbytes)
        self.host = HostMemory(runtime, self.enter_concurrently, lent_limit_nbytes, warn, locked_limit_nbytes)
        self.exports = ExportPool(runtime, retained_nbytes)
        self.opened = OpenedHandles(
            runtime, number, Background(self.enter_concurrently, "gs-handles"), OF_THIS_PROCESS
        )
        self.returns = Returns(runtime, number, self.events, self.opened)
        self._threads = threading.local()

    def enter(self) -> None:
        """Select the device in the calling thread. Every thread must do this before it uses the device."""
        self.runtime.use_device(self.number)

    def enter_concurrently(self) -> None:
        """Select the device, once, in a thread beside the callable's, which may capture a graph."""
        if not hasattr(self._threads, "has_entered"):
            self.enter()
            self.runtime.tolerate_captures()
            self._threads.has_entered = True

    def order_after_default(self) -> None:
        """Order later work of this thread's current streams after the default stream's present work."""
        if others := self.arrays.streams() - {DEFAULT_STREAM}:
            event = self.events.acquire()
            self.runtime.record(event, DEFAULT_STREAM)
            for stream in others:
                self.runtime.stream_wait_event(stream, event)
            self.events.release_event(event)

    def wait_idle(self) -> None:
        self.runtime.synchronize_stream(self.h2d)
        self.runtime.synchronize_stream(self.d2h)

    def why_lost(self) -> CudaError | None:
        """Return CUDA's reason why this process can no longer use its device, or None if it can."""
        first = self._fault()
        if first is None or first.is_sticky:
            return first
        second = self._fault()  # errors of earlier work are reported once, unless they are permanent
        stays = second is not None and not second.is_out_of_memory and second.code not in _CAPTURE
        return second if stays else None

    def _fault(self) -> CudaError | None:
        try:
            self.enter()
            self.runtime.synchronize()
        except CudaError as error:
            return error
        return None

    def close(self) -> None:
        """Free everything that no array of user code uses."""
        with suppress(CudaError):  # the device is unusable, and its memory is freed with the process
            self.wait_idle()
            self.host.close()
            self.returns.close()
            self.opened.close()
            self.exports.close()
            self.buffers.close()
            self.events.close()
            self.runtime.destroy_stream(self.h2d)
            self.runtime.destroy_stream(self.d2h)


def open_device(
    number: int = 0,
    warn: Callable[[str], None] = lambda _: None,
    lent_limit_nbytes: int = 0,
    limit_nbytes: int = 0,
    locked_limit_nbytes: int = 0,
) -> CudaDevice:
    """Open a device of this process, usually the only one. ``warn`` logs warnings; at most
    ``lent_limit_nbytes`` of clients' memory is page-locked, and ``locked_limit_nbytes`` in all (0: no limit).
    ``limit_nbytes`` limits the device memory of
    cupy's pool and of the worker itself, unless it is 0. Raise ``CudaUnavailable`` without cupy or a driver.
    """
    runtime = load_runtime()
    if limit_nbytes:
        runtime.limit_memory(limit_nbytes)
    runtime.use_device(number)
    h2d, d2h = runtime.create_stream(), runtime.create_stream()
    _, total_nbytes = runtime.memory_nbytes()
    retained_nbytes = max(_RETAINED_NBYTES, total_nbytes // _RETAINED_PART)
    if limit_nbytes:
        retained_nbytes = min(retained_nbytes, limit_nbytes // _RETAINED_PART)
    return CudaDevice(
        runtime, number, h2d, d2h, retained_nbytes, lent_limit_nbytes, warn, locked_limit_nbytes
    )
