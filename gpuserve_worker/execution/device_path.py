"""``Model``, and the interfaces between the worker's loops and its kind of device: ``WorkerDevicePath``, and
its objects for one front, one batch and one loop.

``HostPath`` in ``loop.py`` is the plain implementation, ``cuda/cuda_path.py`` that of a GPU. Another kind of
device is a folder that implements these protocols, and a branch in ``loading.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpuserve_worker.inference.callable_loading import InferenceCallable
from gpuserve_worker.inference.model_context import ModelContext
from gpuserve_worker.memory.client_regions import DeviceRegionOpener, RegionLocks

if TYPE_CHECKING:
    from gpuserve_worker.execution.batch_inputs import BatchPart
    from gpuserve_worker.execution.execution import Execution, Stopwatch
    from gpuserve_worker.execution.lifecycle import Reporter
    from gpuserve_worker.execution.session import FrontSession
    from gpuserve_worker.inference.inference_request import Batch
    from gpuserve_worker.inference.outputs import BatchAnswers, DeviceReader
    from gpuserve_worker.memory.arena import Arena, SegmentSupplier
    from gpuserve_worker.memory.batch_tensors import OutputWriter, Written
    from gpuserve_worker.protocol import wire
    from gpuserve_worker.protocol.link import Link


class Model(NamedTuple):
    """A loaded callable with its declaration and its device path. ``slots`` is the number of concurrent
    batches. ``concurrent``: the callable awaits or yields. ``stepped``: the callable has ``admit`` and
    ``step``. ``all_lines``: clients receive every line of its exceptions. ``owned_outputs``: the callable
    never writes to memory again that it has returned.
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

    @property
    def name(self) -> str:
        return self.context.name


class Arrival(Protocol):
    """The transfer of a batch's inputs to a device."""

    def admit(self) -> None:
        """Order later device work of this thread after the arrival of the inputs. Does not block."""


class OutputCopies(Protocol):
    """The transfer of one batch's outputs from a device to memory that the front reads."""

    def is_ready(self) -> bool:
        """Return whether ``wait()`` would return at once."""

    def wait(self) -> Written:
        """Wait for all bytes and return the responses as they are sent. Raise ``DeviceFailure``."""


class DeviceSession(DeviceRegionOpener, Protocol):
    """The device's part of a session with one front."""

    @property
    def reader(self) -> DeviceReader:
        """The reader of arrays that are on the device."""

    @property
    def writer(self) -> OutputWriter:
        """The writer of outputs that are on the host or on the device."""

    def is_open(self, run: wire.Run) -> bool:
        """Return whether memory that a batch names is open or unavailable; else ``stage`` blocks."""

    def wait_open(self, run: wire.Run) -> None:
        """Wait until the memory that a batch names is open, or known to be unavailable."""

    def stage(
        self, run: wire.Run, failures: dict[int, wire.WireFailure]
    ) -> tuple[dict[str, Any], Arrival | None]:
        """Return all inputs of a batch by name, and the arrival of those in transfer to the device. Add
        requests whose bytes cannot be read to ``failures``, by position.
        """

    def warm(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the numpy arrays of a warm-up with the kind and location that the callable expects."""

    def start_output_copies(
        self,
        answers: BatchAnswers,
        requests: Sequence[wire.WireRequest | int],
        mark_computed: Callable[[], tuple[int, int]] | None = None,
    ) -> OutputCopies:
        """Start copying responses to memory that the front reads. ``mark_computed`` is that of the batch's
        stopwatch. Raise as ``write``, and ``DeviceFailure``.
        """

    def wait_inputs_read(self, batch_id: int) -> None:
        """Wait until no copy reads the input memory of a batch."""

    def process_message(self, message: wire.Message) -> bool:
        """Process a message about device memory. Return False if it is about something else."""

    def retire(self) -> None:
        """Stop exporting memory for the front, which is gone."""

    def close(self) -> None:
        """Close the memory that the front lent."""


class Recovery(Protocol):
    """The handling of failed batches."""

    @property
    def device_is_lost(self) -> bool:
        """Whether this process can no longer use its device."""

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
        """Whether ``run`` ended because this process can no longer use its device."""

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


class WorkerDevicePath(Protocol):
    """The access of a worker's instance to its device."""

    @property
    def page_locks(self) -> RegionLocks | None:
        """The locker of mapped memory for the device's copies, if the device needs one."""

    @property
    def spares(self) -> SegmentSupplier | None:
        """The supplier of segments for output arenas, if making one takes long."""

    @property
    def reader(self) -> DeviceReader | None:
        """The reader of arrays on the device, or None without a device."""

    def new_watch(self) -> Stopwatch:
        """Return the stopwatch of a batch that has just arrived."""

    def open_session(self, front: FrontSession, arena: Arena) -> DeviceSession | None:
        """Return the device's part of a front's session, with the output arena; None on the host."""

    def enter_concurrently(self) -> None:
        """Select the device in the calling thread, beside other threads in which the callable computes."""

    def new_loop(self, link: Link, model: Model, reporter: Reporter) -> WorkerLoop:
        """Return the loop of a plain callable, which runs one batch at a time."""

    def new_recovery(self, execution: Execution, model: Model, reporter: Reporter) -> Recovery:
        """Return the recovery of the model's asyncio loop."""

    def close(self) -> None:
        """Close the device, in a process that continues."""
