"""A worker's device path to a GPU, opened before user code is imported, and its batches' stopwatch."""

from __future__ import annotations

import importlib.util
import itertools
from functools import partial
from time import perf_counter_ns
from typing import Final

from gpuserve_worker.cuda.copies.cuda_session import CudaSession, Staging, device_inputs
from gpuserve_worker.cuda.cuda_loop import CudaLoop
from gpuserve_worker.cuda.device.device import CudaDevice, open_device
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, CudaError, CudaUnavailable, TimedRuntime
from gpuserve_worker.cuda.recovery import CudaRecovery, free_memory
from gpuserve_worker.execution.device_path import Model, Stopwatch
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.session import InputReader
from gpuserve_worker.inference.callable_loading import LoadError
from gpuserve_worker.inference.failure import client_text
from gpuserve_worker.memory.device_copies import DeviceSpace, offer_spaces
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import BF16, TensorSpec
from gpuserve_worker.protocol.wire import Init


class CudaPath:
    """The device path of one GPU; implements ``WorkerDevicePath``."""

    def __init__(self, device: CudaDevice, staging: Staging) -> None:
        self._device = device
        self._staging = staging
        self.page_locks = device.host.locks
        self.spares = device.host.spare
        self.reader = device.arrays
        every = 1 if isinstance(device.runtime, TimedRuntime) else SAMPLE_EVERY
        self.new_watch = partial(CudaStopwatch, device, TimeSamples(every=every))
        self.open_session = partial(CudaSession, device, staging)
        self.enter_concurrently = device.enter_concurrently
        self.release_memory = partial(free_memory, device)
        self.close = device.close

    def new_loop(self, link: Link, model: Model, reporter: Reporter) -> CudaLoop:
        return CudaLoop(link, model, self._device, reporter)

    def new_recovery(self, read_inputs: InputReader, model: Model, reporter: Reporter) -> CudaRecovery:
        return CudaRecovery(self._device, read_inputs, model, reporter)


def open_cuda(init: Init, reporter: Reporter) -> CudaPath | None:
    """Open the path to the GPU; None if CUDA is unusable and not needed, else raise ``LoadError``."""
    needed = init.array != "numpy" or any(TensorSpec(*one).memory == "gpu" for one in init.inputs)
    if not needed and importlib.util.find_spec("cupy") is None:
        return None
    try:
        number = int(init.device.partition(":")[2] or 0)
        limits = init.lent_limit_nbytes, init.gpu_memory_nbytes, init.locked_limit_nbytes
        device = open_device(number, reporter.warning, *limits)
        if init.array == "cupy":
            _check_types(init, device)
        device.host.spare.make()  # no request waits yet
        offer_spaces(partial(_open_space, device, reporter))
    except (CudaUnavailable, CudaError) as error:
        if needed:
            raise LoadError(
                f"device {init.device} of the worker cannot be used: {client_text(error)}"
            ) from None
        reporter.warning(f"outputs on the device cannot be taken from there: {client_text(error)}")
        return None
    names = device_inputs(TensorSpec(*one) for one in init.inputs)
    rows = max(1, init.max_batch_size) if init.static_inputs else 0
    staging = Staging(device, names, init.array, read_only=init.read_only_inputs, static_rows=rows)
    return CudaPath(device, staging)


def _open_space(device: CudaDevice, reporter: Reporter, name: str) -> DeviceSpace | None:
    """Return the shared memory of a device; None, with a warning, if it cannot be shared."""
    from gpuserve_worker.cuda.device.shared_memory import SharedDeviceMemory  # most models share no weights

    kind, _, number = name.partition(":")
    if kind != "cuda":
        return None
    try:
        return SharedDeviceMemory(device.runtime, int(number or device.number))
    except (CudaError, AttributeError, ValueError) as error:
        reporter.warning(
            f"shared weights on {name} are copied for each instance, because the device's memory cannot be "
            f"shared: {client_text(error)}"
        )
        return None


def _check_types(init: Init, device: CudaDevice) -> None:
    """Raise ``LoadError`` if CuPy lacks the type of an input."""
    for spec in (TensorSpec(*one) for one in init.inputs):
        if spec.memory != "gpu" or spec.datatype != BF16:
            continue
        try:
            device.arrays.over(device.arrays.memory(0, 0, None), 0, BF16, (0,), "cupy")
        except (TypeError, ValueError):
            raise LoadError(
                f"input {spec.name!r} is BF16, which this version of CuPy has no arrays of: expected CuPy 14 "
                "or newer, or array torch"
            ) from None


#: The device's times are measured for one batch of so many.
SAMPLE_EVERY: Final = 64
#: Indexes of a batch's events in time order; an event of 0 does not exist.
_TAKEN, _ARRIVED, _START, _END, _LANDED = range(5)
_EVENTS: Final = 5


class TimeSamples:
    """The choice of batches whose times on the device are measured, and the last of these times."""

    def __init__(self, *, every: int) -> None:
        self._every = every
        self._numbers = itertools.count()
        #: Phases of the last measured batch, in ns.
        self.phases = (0, 0, 0)

    def is_due(self) -> bool:
        """Count a batch. The first ones, which libraries compile in, are followed by samples more often."""
        number = next(self._numbers)
        return number % self._every == 0 or number & (number - 1) == 0


class CudaStopwatch(Stopwatch):
    """A stopwatch of the host and the device. Its methods raise ``CudaError``, except ``phases``.

    Work on the device continues after the host's call returns, so events on its streams measure each phase of
    a sampled batch, independently of overlapping batches. All other batches have the last sample's phases, if
    these are longer than their own times on the host. No method but ``wait_computed`` blocks.

    ::

        h2d stream       | inputs |
        default stream              |  the callable's work  |
        d2h stream                                          | outputs |
    """

    __slots__ = (
        "_computed", "_device", "_events", "_has_returned", "_left_ns", "_samples", "_staged_ns", "_ticket",
    )  # fmt: skip

    def __init__(self, device: CudaDevice, samples: TimeSamples) -> None:
        super().__init__()
        self._device = device
        self._samples = samples
        self._events = [0] * _EVENTS if samples.is_due() else []
        #: The event after the callable's work, and its ticket.
        self._computed = self._ticket = 0
        self._has_returned = False
        self._staged_ns = self._left_ns = 0
        if self._events:
            self._record(_TAKEN, device.h2d)

    def staged(self) -> None:
        self._staged_ns = perf_counter_ns()
        if self._events:
            self._record(_ARRIVED, self._device.h2d)

    def called(self) -> None:
        self.called_ns = self.returned_ns = perf_counter_ns()
        if self._events:
            self._record(_START, DEFAULT_STREAM)

    def returned(self) -> None:
        self.returned_ns = perf_counter_ns()
        self._has_returned = True
        self._device.arrays.join()  # so that work of other streams is included
        if self._events:
            self._record(_END, DEFAULT_STREAM)

    def mark_computed(self) -> tuple[int, int]:
        event = self._computed or self._device.events.acquire()
        self._ticket = self._device.progress.record(event)
        self._computed = event
        return event, self._ticket

    def leaving(self) -> None:
        self._left_ns = perf_counter_ns()
        if self._events:
            self._record(_LANDED, self._device.d2h)

    def has_computed(self) -> bool:
        if not self._computed:
            if not self._has_returned:
                return True
            self.mark_computed()  # its reply failed before: raises if the device is lost
        if self._ticket <= self._device.progress.completed:
            return True
        is_complete = self._device.runtime.is_complete(self._computed)
        if is_complete:
            self._device.progress.complete(self._ticket)
        return is_complete

    def wait_computed(self) -> None:
        self._device.runtime.wait(self._computed)
        self._device.progress.complete(self._ticket)

    def phases(self) -> tuple[int, int, int]:
        before_ns = (self._staged_ns or self.called_ns) - self.received_ns
        infer_ns = self.returned_ns - self.called_ns
        after_ns = (self._left_ns or perf_counter_ns()) - self.returned_ns
        if self._events:
            staging_ns, computing_ns = self._elapsed_ns(_TAKEN, _ARRIVED), self._elapsed_ns(_START, _END)
            # Earlier work on the stream is in the host's time, but not in that of the events.
            infer_ns = computing_ns or infer_ns
            self._samples.phases = staging_ns, computing_ns, self._elapsed_ns(_END, _LANDED)
        sampled = self._samples.phases
        return (
            max(before_ns, sampled[0]),
            infer_ns if self._events else max(infer_ns, sampled[1]),
            max(after_ns, sampled[2]),
        )

    def __del__(self) -> None:
        if self._computed:
            self._device.events.release_event(self._computed)
        for event in self._events:
            if event:
                self._device.events.release_event(event, timing=True)

    def _record(self, which: int, stream: int) -> None:
        event = self._events[which] = self._events[which] or self._device.events.acquire(timing=True)
        self._device.runtime.record(event, stream)

    def _elapsed_ns(self, start: int, end: int) -> int:
        first, last = self._events[start], self._events[end]
        try:
            return max(0, self._device.runtime.elapsed_ns(first, last)) if first and last else 0
        except CudaError:  # not recorded yet; the reply reports errors
            return 0
