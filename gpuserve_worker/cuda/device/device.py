"""A worker's device: CUDA itself, the two streams that copies run on, and the memory that they need. Opened
once in the life of a worker, before any code of the user is there. What is copied is not decided here.

::

    h2d stream       inputs k+1 -> device
    default stream           the callable, batch k (and whatever it starts)
    d2h stream                       outputs k-1 -> arena

No stream waits for another one but by an event, and the host waits only for the end of the last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gpuserve_worker.cuda.device.arrays import CudaArrays
from gpuserve_worker.cuda.device.background import Background
from gpuserve_worker.cuda.device.buffers import Buffers
from gpuserve_worker.cuda.device.exports import OF_THIS_PROCESS, ExportPool
from gpuserve_worker.cuda.device.host_memory import HostMemory
from gpuserve_worker.cuda.device.loans import Returns
from gpuserve_worker.cuda.device.opened import OpenedMemories
from gpuserve_worker.cuda.device.runtime import CudaError, Events, Runtime, load_runtime

#: Of the device's memory, so much is kept for inputs between batches: a part of it, and at least some. As
#: much may be taken for outputs that other workers read, once somebody asks for them.
_RETAINED_PART: Final = 16
_RETAINED_NBYTES: Final = 256 << 20
#: ``cudaErrorStreamCapture...``: of a graph that a thread of the callable is making just now.
_CAPTURE: Final = range(900, 909)


class CudaDevice:
    """Made by ``open_device``. Any thread may use it. ``h2d`` and ``d2h`` are streams; ``buffers`` are memory
    of the device, ``host`` is that of the host; ``exports`` is what other workers may read,
    ``opened`` and ``returns`` what is lent of theirs.
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
    ) -> None:
        self.runtime = runtime
        self.number = number
        self.h2d = h2d
        self.d2h = d2h
        self.events = Events(runtime)
        self.arrays = CudaArrays(runtime, self.events, number)
        self.buffers = Buffers(runtime, retained_nbytes)
        self.host = HostMemory(runtime, self.events, self.enter_beside, lent_limit_nbytes, warn)
        self.exports = ExportPool(runtime, retained_nbytes)
        self.opened = OpenedMemories(
            runtime, number, Background(self.enter_beside, "gs-handles"), OF_THIS_PROCESS
        )
        self.returns = Returns(runtime, number, self.events, self.opened)

    def enter(self) -> None:
        """Make it the current device of the calling thread; every thread that uses it begins with this."""
        self.runtime.use_device(self.number)

    def enter_beside(self) -> None:
        """As ``enter``, beside the thread of the callable, which may capture a graph there."""
        self.enter()
        self.runtime.tolerate_captures()

    def settle(self) -> None:
        self.runtime.synchronize_stream(self.h2d)
        self.runtime.synchronize_stream(self.d2h)

    def why_lost(self) -> str | None:
        """Why this process can use its device no more, in CUDA's words; None where it can."""
        first = self._fault()
        if first is None or first.is_sticky:
            return None if first is None else str(first)
        second = self._fault()  # what earlier work did wrong is told once, unless it stays
        stays = second is not None and not second.is_out_of_memory and second.code not in _CAPTURE
        return str(second) if stays else None

    def _fault(self) -> CudaError | None:
        try:
            self.enter()
            self.runtime.synchronize()
        except CudaError as error:
            return error
        return None

    def close(self) -> None:
        """Give up all of it, as far as no array of the user's is over it."""
        with suppress(CudaError):  # it cannot be used any more, and ends with the process
            self.settle()
            self.host.close()
            self.returns.close()
            self.opened.close()
            self.exports.close()
            self.buffers.close()
            self.events.close()
            self.runtime.destroy_stream(self.h2d)
            self.runtime.destroy_stream(self.d2h)


def open_device(
    number: int = 0, warn: Callable[[str], None] = lambda _: None, lent_limit_nbytes: int = 0
) -> CudaDevice:
    """Open a device of this process, the only one as a rule. ``warn`` is told what is to be logged; of the
    memory that clients lend, ``lent_limit_nbytes`` may be locked. Raises ``CudaUnavailable`` without cupy or
    a driver.
    """
    runtime = load_runtime()
    runtime.use_device(number)
    h2d, d2h = runtime.create_stream(), runtime.create_stream()
    _, total_nbytes = runtime.memory_nbytes()
    retained_nbytes = max(_RETAINED_NBYTES, total_nbytes // _RETAINED_PART)
    return CudaDevice(runtime, number, h2d, d2h, retained_nbytes, lent_limit_nbytes, warn)
