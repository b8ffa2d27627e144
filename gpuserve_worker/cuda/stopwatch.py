"""How long a batch took on the device, where work is still under way when the host has gone on: by events on
the streams that it runs on. So each phase is that of this batch alone, however much of others it overlapped.
Nothing waits here.

::

    h2d stream       | inputs |
    default stream              |  the callable's work  |
    d2h stream                                          | outputs |
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Final

from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, CudaError
from gpuserve_worker.running.execution import Stopwatch

#: The events of one batch, in their order; 0 where there is none.
_TAKEN, _ARRIVED, _START, _END, _LANDED = range(5)
_EVENTS: Final = 5


class CudaStopwatch(Stopwatch):
    """A stopwatch of both the host and the device. Its methods raise ``CudaError``, but for ``phases``."""

    __slots__ = ("_device", "_events", "_left_ns", "_staged_ns")

    def __init__(self, device: CudaDevice) -> None:
        super().__init__()
        self._device = device
        self._events = [0] * _EVENTS
        self._staged_ns = self._left_ns = 0
        self._record(_TAKEN, device.h2d)

    def staged(self) -> None:
        self._staged_ns = perf_counter_ns()
        self._record(_ARRIVED, self._device.h2d)

    def called(self) -> None:
        super().called()
        self._record(_START, DEFAULT_STREAM)

    def returned(self) -> None:
        super().returned()
        self._device.arrays.join()  # else the work of other streams would count for nothing
        self._record(_END, DEFAULT_STREAM)

    def leaving(self) -> None:
        self._left_ns = perf_counter_ns()
        self._record(_LANDED, self._device.d2h)

    def has_computed(self) -> bool:
        return not self._events[_END] or self._device.runtime.has_come(self._events[_END])

    def wait_computed(self) -> None:
        self._device.runtime.wait(self._events[_END])

    def phases(self) -> tuple[int, int, int]:
        before_ns = (self._staged_ns or self.called_ns) - self.received_ns
        # What ran before on the stream is in the time of the host, and not in that of the events.
        infer_ns = self._elapsed_ns(_START, _END) or self.returned_ns - self.called_ns
        after_ns = (self._left_ns or perf_counter_ns()) - self.returned_ns
        return (
            max(before_ns, self._elapsed_ns(_TAKEN, _ARRIVED)),
            infer_ns,
            max(after_ns, self._elapsed_ns(_END, _LANDED)),
        )

    def __del__(self) -> None:
        for event in self._events:
            if event:
                self._device.events.give(event, timing=True)

    def _record(self, which: int, stream: int) -> None:
        event = self._events[which] = self._events[which] or self._device.events.take(timing=True)
        self._device.runtime.record(event, stream)

    def _elapsed_ns(self, start: int, end: int) -> int:
        first, last = self._events[start], self._events[end]
        try:
            return max(0, self._device.runtime.elapsed_ns(first, last)) if first and last else 0
        except CudaError:  # not there yet; what went wrong the answer itself tells
            return 0
