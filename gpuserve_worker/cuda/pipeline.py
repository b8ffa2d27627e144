"""The pipeline of a ``CudaLoop``: the stages of each batch, and the queue of batches that its threads share.

::

                staged             called              returned            answered
    RECEIVED ───────────► ARRIVING ───────► COMPUTING ──────────► LEAVING ──────────► ENDED
        │ dropped            │ dropped
        └────────► DROPPED ◄─┘

Copies to the device, calls and copies back overlap, each in the order of the batches; one call runs at a
time. The front bounds the number of batches: it sends no more than it has slots for. Slots are freed early
(``wire.Computed``) for one batch at a time, so that slow copies do not accumulate.

``Pipeline`` is pure: no CUDA, thread or lock. ``Jobs`` adds the locks. The receiving thread adds batches, the
staging thread stages them, the loop's thread calls them, and either the loop's or the reply thread answers
them.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from contextlib import suppress
from typing import Final, Generic, TypeVar

from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.runtime import CudaError
from gpuserve_worker.execution.batch_inputs import BatchInputs
from gpuserve_worker.execution.device_path import Stopwatch
from gpuserve_worker.execution.execution import Execution, PendingReply
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.inference.failure import DeviceFailure
from gpuserve_worker.memory.client_regions import RegionError
from gpuserve_worker.protocol.wire import BatchReply, Computed, Run

#: A copy back of fewer bytes ends before the front can use a slot that is freed early.
ANNOUNCED_NBYTES: Final = 1 << 20


class BatchStage(enum.StrEnum):
    """The stage of a batch between its message and its reply. Strings hash without a call of Python."""

    RECEIVED = "its message has come"
    ARRIVING = "its inputs are on their way to the device"
    COMPUTING = "its callable is called"
    LEAVING = "its outputs are on their way back"
    ENDED = "it is answered"
    DROPPED = "the front that wanted it is gone"


#: The possible next stages of each stage.
NEXT: Final = {
    BatchStage.RECEIVED: (BatchStage.ARRIVING, BatchStage.DROPPED),
    BatchStage.ARRIVING: (BatchStage.COMPUTING, BatchStage.DROPPED),
    BatchStage.COMPUTING: (BatchStage.LEAVING,),
    BatchStage.LEAVING: (BatchStage.ENDED,),
}


class IllegalStep(Exception):
    """A transition that a stage does not allow: a defect of the worker."""


class PipelinedBatch:
    """A batch in the pipeline. ``nbytes`` is the size of its copies back. ``is_cleared``: its work on the
    device ended without error, so it did not cause a later fault.
    """

    def __init__(self, batch_id: int) -> None:
        self.batch_id = batch_id
        self.stage = BatchStage.RECEIVED
        self.nbytes = 0
        self.is_cleared = False

    def advance(self, stage: BatchStage) -> None:
        """Move to a stage. Raise ``IllegalStep`` if the present stage does not lead there."""
        if stage not in NEXT.get(self.stage, ()):
            raise IllegalStep(f"batch {self.batch_id}: {stage.name} after {self.stage.name}")
        self.stage = stage


_Batch = TypeVar("_Batch", bound=PipelinedBatch)


class Pipeline(Generic[_Batch]):
    """The batches of one worker that have not ended, oldest first."""

    def __init__(self) -> None:
        #: Batches in RECEIVED or ARRIVING.
        self.waiting: deque[_Batch] = deque()
        self._computing: _Batch | None = None
        #: Batches in LEAVING.
        self.departing: deque[_Batch] = deque()

    def __len__(self) -> int:
        """Return the number of batches that wait to be called."""
        return len(self.waiting)

    @property
    def leaving(self) -> int:
        return len(self.departing)

    def is_only_possible_cause(self, batch: _Batch) -> bool:
        """Return whether only this batch can have caused a fault of the device."""
        suspects = [*self.departing, self._computing]
        return [one for one in suspects if one is not None and not one.is_cleared] == [batch]

    def receive(self, batch: _Batch) -> None:
        self.waiting.append(batch)

    def next_to_stage(self) -> _Batch | None:
        return next((one for one in self.waiting if one.stage is BatchStage.RECEIVED), None)

    def next_to_call(self) -> _Batch | None:
        """Return the oldest waiting batch if no other is being called. It may still have to be staged."""
        return self.waiting[0] if self.waiting and self._computing is None else None

    def staged(self, batch: _Batch) -> None:
        batch.advance(BatchStage.ARRIVING)

    def called(self, batch: _Batch) -> None:
        """Record the call of a batch. Raise ``IllegalStep`` if it is not the next one."""
        if self._computing is not None or not self.waiting or self.waiting[0] is not batch:
            raise IllegalStep(f"batch {batch.batch_id} is called out of turn")
        batch.advance(BatchStage.COMPUTING)
        self._computing = self.waiting.popleft()

    def returned(self, batch: _Batch, nbytes: int) -> None:
        """Record the end of a call, successful or not, and the number of bytes to copy back."""
        batch.advance(BatchStage.LEAVING)
        batch.nbytes = nbytes
        self._computing = None
        self.departing.append(batch)

    def answered(self, batch: _Batch) -> None:
        if not self.departing or self.departing[0] is not batch:
            raise IllegalStep(f"batch {batch.batch_id} is answered out of turn")
        batch.advance(BatchStage.ENDED)
        self.departing.popleft()

    def computed(self, batch: _Batch) -> _Batch | None:
        """Record that the work of a batch ended without error. Return the batch if the front is to free its
        slot now: when the copy takes a while and batches with slots of their own follow.
        """
        batch.is_cleared = True
        if not self.departing or self.departing[0] is not batch or batch.nbytes < ANNOUNCED_NBYTES:
            return None
        behind = len(self.waiting) + (self._computing is not None) + len(self.departing) - 1
        return batch if behind else None

    def drop_waiting(self) -> list[_Batch]:
        dropped = list(self.waiting)
        self.waiting.clear()
        for batch in dropped:
            batch.advance(BatchStage.DROPPED)
        return dropped


class Job(PipelinedBatch):
    """One batch and its objects at each stage. ``problem`` is the reason for missing inputs."""

    def __init__(self, session: FrontSession, run: Run) -> None:
        super().__init__(run.batch_id)
        self.session = session
        self.run = run
        #: Replaced by a stopwatch of the device when the batch is staged.
        self.watch = Stopwatch()
        self.inputs: BatchInputs | None = None
        self.problem: RegionError | DeviceFailure | None = None
        self.pending_reply: PendingReply | None = None


class Jobs:
    """All batches that have not ended; implements ``Backlog``. Any thread may call any method."""

    def __init__(self, device: CudaDevice, execution: Execution) -> None:
        self._device = device
        self._execution = execution
        self._pipeline: Pipeline[Job] = Pipeline()
        # Reentrant: a garbage collection inside may delete what receives messages, and so batches.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Number of threads that wait for ``_changed``.
        self._draining = 0
        #: Held while the transfer of inputs is started.
        self._staging = threading.Lock()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._pipeline.waiting)

    @property
    def leaving(self) -> int:
        return len(self._pipeline.departing)

    def enqueue(self, session: FrontSession, run: Run) -> None:
        with self._lock:
            self._pipeline.receive(Job(session, run))

    def cancel(self, batch_id: int, position: int) -> None:
        """Do nothing: the inputs may be in transfer to the device, so the batch runs."""

    def clear(self) -> None:
        with self._lock:
            for job in self._pipeline.drop_waiting():
                job.inputs = None

    def wait_idle(self) -> None:
        self.drain()
        with suppress(CudaError):  # after an error no copy is running
            self._device.enter()
            self._device.wait_idle()

    def stage_waiting(self) -> None:
        while True:
            with self._lock:
                job = self._pipeline.next_to_stage()
            if job is None or not self._stage(job, ahead=True):
                return

    def dequeue(self) -> Job | None:
        """Return the next batch to call, with its inputs in transfer, or None."""
        with self._lock:
            job = self._pipeline.next_to_call()
        if job is None:
            return None
        if job.stage is BatchStage.RECEIVED:
            self._stage(job, ahead=False)
        with self._lock:
            if job.stage is not BatchStage.ARRIVING:
                job.inputs = None
                return None
            self._pipeline.called(job)
        return job

    def returned(self, job: Job, nbytes: int) -> None:
        with self._lock:
            self._pipeline.returned(job, nbytes)

    def computed(self, job: Job) -> None:
        """Record that a batch's work on the device ended without error, and tell the front if that helps."""
        with self._lock:
            announced = self._pipeline.computed(job)
        if announced is not None:
            announced.session.send(Computed((announced.batch_id,)))

    def answer(self, job: Job, reply: BatchReply) -> None:
        job.session.reply(reply)
        with self._lock:
            self._pipeline.answered(job)
            if self._draining:
                self._changed.notify_all()

    def is_only_possible_cause(self, job: Job) -> bool:
        with self._lock:
            return self._pipeline.is_only_possible_cause(job)

    def drain(self) -> None:
        """Wait until all called batches are answered, or until ``abort``."""
        with self._lock:
            self._draining += 1
            self._changed.wait_for(lambda: self._is_over or not self._pipeline.leaving)
            self._draining -= 1

    def abort(self) -> None:
        with self._lock:
            self._is_over = True
            self._changed.notify_all()

    def _stage(self, job: Job, *, ahead: bool) -> bool:
        """Start the transfer of a batch's inputs. Return whether it has started or never will. A failed
        attempt ``ahead`` of the batch's turn is repeated in its turn.
        """
        if not self._is_open(job, ahead=ahead):
            return False
        with self._staging:
            if job.stage is not BatchStage.RECEIVED:
                return True
            inputs: BatchInputs | None = None
            job.session.leases.begin(job.batch_id)
            try:
                job.watch = self._execution.new_watch()
                inputs = self._execution.read_inputs(job.session, job.run)
                job.watch.staged()
            except (RegionError, DeviceFailure) as error:
                if ahead:
                    return False
                job.problem = error
            with self._lock:
                if job.stage is BatchStage.RECEIVED:
                    job.inputs = inputs
                    self._pipeline.staged(job)
        return True

    def _is_open(self, job: Job, *, ahead: bool) -> bool:
        """Return whether memory of other processes that the batch names is open, or known to be unavailable.
        Block for it only in the batch's turn; other batches keep their order meanwhile.
        """
        device = job.session.device
        assert device is not None, "there is one in a loop of it"
        if device.is_open(job.run):
            return True
        if not ahead:
            device.wait_open(job.run)
        return not ahead
