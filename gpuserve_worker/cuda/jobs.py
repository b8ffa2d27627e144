"""The batches of a ``CudaLoop``, as its threads share them: kept by whichever receives, staged ahead by the
staging thread, called by the loop's own, answered by it or by the reply thread. Which batch may go on is
``pipeline.py``'s to say; here are the locks round it.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from gpuserve_worker.calling.failure import DeviceFailure
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.runtime import CudaError
from gpuserve_worker.cuda.pipeline import BatchStage, Pipeline, PipelinedBatch
from gpuserve_worker.memory.regions import RegionError
from gpuserve_worker.protocol.wire import Computed, Run
from gpuserve_worker.running.batch_inputs import BatchInputs
from gpuserve_worker.running.execution import Execution, PendingReply, Stopwatch
from gpuserve_worker.running.session import BatchReply, FrontSession


class Job(PipelinedBatch):
    """One batch: whose it is, and what there is of it at each stage. ``problem`` is why it has no inputs."""

    def __init__(self, session: FrontSession, run: Run) -> None:
        super().__init__(run.batch_id)
        self.session = session
        self.run = run
        #: Until it is staged, one that knows of no device.
        self.watch = Stopwatch()
        self.inputs: BatchInputs | None = None
        self.problem: RegionError | DeviceFailure | None = None
        self.pending_reply: PendingReply | None = None


class Jobs:
    """All that have not ended; implements ``Backlog``. Any thread may call any method."""

    def __init__(self, device: CudaDevice, execution: Execution) -> None:
        self._device = device
        self._execution = execution
        self._pipeline: Pipeline[Job] = Pipeline()
        self._changed = threading.Condition()
        #: Held while inputs are brought on their way.
        self._staging = threading.Lock()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._pipeline)

    @property
    def leaving(self) -> int:
        return self._pipeline.leaving

    def keep(self, session: FrontSession, run: Run) -> None:
        with self._changed:
            self._pipeline.receive(Job(session, run))

    def cancel(self, batch_id: int, position: int) -> None:
        """Its inputs may be on their way to the device: it runs."""

    def clear(self) -> None:
        with self._changed:
            for job in self._pipeline.drop_waiting():
                job.inputs = None

    def settle(self) -> None:
        self.drain()
        with suppress(CudaError):  # after one nothing is copied any more
            self._device.enter()
            self._device.settle()

    def stage_ahead(self) -> None:
        while True:
            with self._changed:
                job = self._pipeline.next_to_stage()
            if job is None or not self._stage(job, ahead=True):
                return

    def take(self) -> Job | None:
        """The next one to be called, with its inputs on their way; None where there is none any more."""
        with self._changed:
            job = self._pipeline.next_to_call()
        if job is None:
            return None
        if job.stage is BatchStage.RECEIVED:
            self._stage(job, ahead=False)
        with self._changed:
            if job.stage is not BatchStage.ARRIVING:
                job.inputs = None
                return None
            self._pipeline.called(job)
        return job

    def returned(self, job: Job, nbytes: int) -> None:
        with self._changed:
            self._pipeline.returned(job, nbytes)

    def computed(self, job: Job) -> None:
        """Note that a batch's work on the device has ended well; the front is told, where that is of use."""
        with self._changed:
            announced = self._pipeline.computed(job)
        if announced is not None:
            announced.session.send(Computed((announced.batch_id,)))

    def answer(self, job: Job, reply: BatchReply) -> None:
        job.session.reply(reply)
        with self._changed:
            self._pipeline.answered(job)
            self._changed.notify_all()

    def is_only_suspect(self, job: Job) -> bool:
        with self._changed:
            return self._pipeline.is_only_suspect(job)

    def drain(self) -> None:
        """Wait until all that have been called are answered, or until ``give_up``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._pipeline.leaving)

    def give_up(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _stage(self, job: Job, *, ahead: bool) -> bool:
        """Whether its inputs are on their way, or never will be. What fails ``ahead`` is tried again in its
        turn.
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
            with self._changed:
                if job.stage is BatchStage.RECEIVED:
                    job.inputs = inputs
                    self._pipeline.staged(job)
        return True

    def _is_open(self, job: Job, *, ahead: bool) -> bool:
        """Whether memory of others that the batch names is there, or never will be. In its turn it is waited
        for; batches before it go on meanwhile, and those behind it have to keep their order.
        """
        device = job.session.device
        assert device is not None, "there is one in a loop of it"
        if device.is_open(job.run):
            return True
        if not ahead:
            device.wait_open(job.run)
        return not ahead
