"""``Model``, and the interfaces between the worker's loops and its kind of device: ``WorkerDevicePath``, and
its objects for one front, one batch and one loop.

``HostPath`` in ``loop.py`` is the plain implementation, ``cuda/cuda_path.py`` that of a GPU. Another kind of
device is a folder that implements these protocols, and a branch in ``loading.py``.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple, Protocol

from gpuserve_worker.execution.batch_inputs import BatchPart
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.ranks import Rank
from gpuserve_worker.execution.session import FrontSession, InputReader, SessionDevice
from gpuserve_worker.inference.callable_loading import InferenceCallable
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.model_context import ModelContext
from gpuserve_worker.inference.outputs import DeviceReader
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link


class Model(NamedTuple):
    """A loaded callable with its declaration and its device path. ``slots`` is the number of concurrent
    batches. ``concurrent``: the callable awaits or yields. ``stepped``: the callable has ``admit`` and
    ``step``. ``all_lines``: clients receive every line of its exceptions. ``owned_outputs``: the callable
    never writes to memory again that it has returned. ``rank`` is None in an instance of one process.
    """

    context: ModelContext
    call: InferenceCallable
    path: WorkerDevicePath
    strict: bool
    exact: bool
    read_only_inputs: bool
    slots: int = 1
    concurrent: bool = False
    all_lines: bool = False
    owned_outputs: bool = False
    static_inputs: bool = False
    stepped: bool = False
    rank: Rank | None = None

    @property
    def name(self) -> str:
        return self.context.name


class Stopwatch:
    """The times (ns) of a batch: received, callable called, callable returned."""

    __slots__ = ("called_ns", "received_ns", "returned_ns")

    def __init__(self) -> None:
        self.received_ns = self.called_ns = self.returned_ns = perf_counter_ns()

    def staged(self) -> None:
        """Record that the inputs are being copied to a device."""

    def called(self) -> None:
        self.called_ns = self.returned_ns = perf_counter_ns()

    def returned(self) -> None:
        self.returned_ns = perf_counter_ns()

    def mark_computed(self) -> tuple[int, int]:
        """Record a device's event after the callable's work. Return the event and its ticket."""
        return 0, 0

    def leaving(self) -> None:
        """Record that the outputs are being copied from a device."""

    def has_computed(self) -> bool:
        return True

    def wait_computed(self) -> None:
        """Block until the device has finished the work that the callable started."""

    def phases(self) -> tuple[int, int, int]:
        return (
            self.called_ns - self.received_ns,
            self.returned_ns - self.called_ns,
            perf_counter_ns() - self.returned_ns,
        )


class Recovery(Protocol):
    """The handling of failed batches."""

    @property
    def device_is_lost(self) -> bool:
        """True if this process can no longer use its device."""

    def should_retry(self, error: BaseException, run: wire.Run, *, was_alone: bool) -> bool:
        """Return whether a second run of a batch that failed with this error may succeed: the batch can be
        split or was not ``was_alone`` on the device, and its inputs are unchanged.
        """

    def parts(self, session: FrontSession, run: wire.Run) -> list[BatchPart]:
        """Return the parts of a batch for its second run, with their inputs in transfer. Nothing may refer to
        the inputs of the first run. Raise ``DeviceFailure`` or ``RegionError`` as ``Execution.read_inputs``.
        """

    def failure(self, error: BaseException, run: wire.Run) -> wire.WireFailure | None:
        """Return the failure of a batch or part that the device caused; None for other causes."""

    async def resolve_failure(self, failed: wire.Failed, *, was_alone: bool) -> wire.Failed | None:
        """Return a failed batch's reply, or None if the device is lost and another worker runs it."""


class WorkerLoop(Protocol):
    """The loop of a worker, which runs batches until the worker ends."""

    @property
    def device_is_lost(self) -> bool:
        """True if ``run`` ended because this process can no longer use its device."""

    def run_warmup(self, batch: Batch) -> None:
        """Call the callable on a warm-up batch, whose result is dropped. Raise the callable's exceptions."""

    def run(self) -> None:
        """Serve until the peer is gone (``OSError`` during a send) or ``stop`` is called. Raise
        ``WireError``, ``ValueError`` or ``KeyError`` if the peer violates the protocol.
        """

    def stop(self) -> None:
        """Make ``run`` return once the received batches are answered. Called from another thread."""

    def close(self) -> None:
        """Free the memory shared with the front after ``run``, in a process that continues."""


class WorkerDevicePath(SessionDevice, Protocol):
    """The access of a worker's instance to its device."""

    @property
    def reader(self) -> DeviceReader | None:
        """The reader of arrays on the device, or None without a device."""

    def new_watch(self) -> Stopwatch:
        """Return the stopwatch of a batch that has just arrived."""

    def enter_concurrently(self) -> None:
        """Select the device in the calling thread, beside other threads in which the callable computes."""

    def new_loop(self, link: Link, model: Model, reporter: Reporter) -> WorkerLoop:
        """Return the loop of a plain callable, which runs one batch at a time."""

    def new_recovery(self, read_inputs: InputReader, model: Model, reporter: Reporter) -> Recovery:
        """Return the recovery of the model's asyncio loop. ``read_inputs`` is that of its execution."""

    def release_memory(self) -> None:
        """Free device memory that is kept for later batches. Any thread may call this."""

    def close(self) -> None:
        """Close the device, in a process that continues."""
