"""What a worker asks of its kind of device: ``WorkerDevicePath``, and what that makes for one front, one
batch and one loop. ``host_path.py`` is the plain implementation, ``cuda/path.py`` that of a GPU. Another kind
is a folder that implements these protocols, and a row in ``devices.py``. No device is named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gpuserve_worker.memory.regions import DeviceRegionOpener, RegionLocks

if TYPE_CHECKING:
    from gpuserve_worker.calling.outputs import BatchAnswers, DeviceReader
    from gpuserve_worker.calling.request import Batch
    from gpuserve_worker.memory.arena import Arena, Spares
    from gpuserve_worker.memory.output_writer import OutputWriter, Written
    from gpuserve_worker.protocol import wire
    from gpuserve_worker.protocol.link import Link
    from gpuserve_worker.running.execution import Execution, Stopwatch
    from gpuserve_worker.running.model import Model
    from gpuserve_worker.running.session import FrontSession
    from gpuserve_worker.running.splitting import BatchPart
    from gpuserve_worker.running.supervision import Reporter


class Arrival(Protocol):
    def admit(self) -> None:
        """Let what this thread starts on the device from now on begin once they are there; does not wait."""


class OutputCopies(Protocol):
    """The outputs of one batch on their way from a device to where the front reads them."""

    def is_ready(self) -> bool:
        """Whether ``wait()`` returns at once."""

    def wait(self) -> Written:
        """The answers as they are sent, once all bytes are there; raises ``DeviceFailure``."""


class DeviceSession(DeviceRegionOpener, Protocol):
    """What a device does with the memory of one front."""

    @property
    def reader(self) -> DeviceReader:
        """Reads arrays that are on the device."""

    @property
    def writer(self) -> OutputWriter:
        """Writes outputs that are on the host or on the device."""

    def is_open(self, run: wire.Run) -> bool:
        """Whether memory of other processes that a batch names is open, or is known not to be there;
        otherwise ``stage`` would wait for it.
        """

    def wait_open(self, run: wire.Run) -> None:
        """Wait until the memory that a batch names is open, or is known not to be there."""

    def stage(
        self, run: wire.Run, failures: dict[int, wire.WireFailure]
    ) -> tuple[dict[str, Any], Arrival | None]:
        """All inputs of a batch by name, those for the device on their way there. Requests whose bytes cannot
        be had are put into ``failures``, by position.
        """

    def warm(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The numpy arrays of a warm-up as the callable is given them."""

    def begin_outputs(
        self, answers: BatchAnswers, requests: Sequence[wire.WireRequest | int]
    ) -> OutputCopies:
        """Begin to copy answers to where the front reads them; raises as ``write``, and ``DeviceFailure``."""

    def settle_inputs(self, batch_id: int) -> None:
        """Wait until nothing is copied any more from the input memory of a batch."""

    def take(self, message: wire.Message) -> bool:
        """Obey a message about memory of the device; False where it is about something else."""

    def retire(self) -> None:
        """Keep nothing more for the front, which is gone."""

    def close(self) -> None:
        """Give up the memory that the front lent."""


class Recovery(Protocol):
    """What is done after a batch has failed."""

    @property
    def device_is_lost(self) -> bool:
        """Whether this process can use its device no more."""

    def is_worth_it(self, error: BaseException, run: wire.Run, *, was_alone: bool) -> bool:
        """Whether a batch that failed with this error may succeed when it is run again: it can be cut, or was
        not ``was_alone`` on the device, and its inputs are as they were.
        """

    def parts(self, session: FrontSession, run: wire.Run) -> list[BatchPart]:
        """The parts of a batch that is to be run again, with their inputs on their way. Nothing may refer to
        what it was run with the first time. Raises ``DeviceFailure`` or ``RegionError`` as
        ``Execution.read_inputs``.
        """

    def failure(self, error: BaseException, run: wire.Run) -> wire.WireFailure | None:
        """What a batch, or a part of one, fails with where the device is the cause; None where it is not."""

    async def judge(self, failed: wire.Failed, *, was_alone: bool) -> wire.Failed | None:
        """What is sent for a batch that failed; None: nothing, since the device is lost."""


class WorkerLoop(Protocol):
    @property
    def device_is_lost(self) -> bool:
        """After ``run``: whether it ended because this process can use its device no more."""

    def try_out(self, batch: Batch) -> None:
        """Call the callable on a warm-up batch that nobody waits for; raises what it raises."""

    def run(self) -> None:
        """Serve until the peer is gone (``OSError`` while something is sent) or ``stop`` is called. Raises
        ``WireError``, ``ValueError`` or ``KeyError`` where the peer broke the protocol.
        """

    def stop(self) -> None:
        """Let ``run`` return once the batches at hand are answered. Called from another thread."""

    def close(self) -> None:
        """Give up the memory shared with the front, after ``run``, in a process that goes on."""


class WorkerDevicePath(Protocol):
    """How batches reach the device that an instance computes on."""

    @property
    def page_locks(self) -> RegionLocks | None:
        """Locks mapped memory for the device's copies, where it needs that."""

    @property
    def spares(self) -> Spares | None:
        """Segments for output arenas, where making one takes long."""

    @property
    def reader(self) -> DeviceReader | None:
        """Reads arrays that are on the device; None where there is none."""

    def new_watch(self) -> Stopwatch:
        """The stopwatch of a batch that has just come."""

    def open_session(self, front: FrontSession, arena: Arena) -> DeviceSession | None:
        """What the device does with the memory that is shared with a new front, and with the worker's own
        output arena; None on the host.
        """

    def enter_beside(self) -> None:
        """Use the device from the calling thread, beside others in which the callable computes."""

    def new_loop(self, link: Link, model: Model, reporter: Reporter) -> WorkerLoop:
        """The loop of a callable that just returns, one batch at a time."""

    def new_recovery(self, execution: Execution, model: Model, reporter: Reporter) -> Recovery:
        """What the asyncio loop of the model does after failures."""

    def close(self) -> None:
        """Give the device up, in a process that goes on."""
