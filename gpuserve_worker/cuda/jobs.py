"""The batches of a ``DeviceLoop``, as its threads share them: kept by whichever receives, staged ahead by the
one that takes in, called by the loop's own, answered by it or by the one that finishes. Which batch may go on
is ``pipeline.py``'s to say; here are the locks round it.
"""

from __future__ import annotations

import threading

from gpuserve_worker.cuda.pipeline import Pipeline, PipelinedBatch, Stage
from gpuserve_worker.execution import Execution
from gpuserve_worker.failure import DeviceError
from gpuserve_worker.finishing import Finishing
from gpuserve_worker.intake import TakenIn
from gpuserve_worker.regions import RegionError
from gpuserve_worker.session import Reply, Session
from gpuserve_worker.stopwatch import Stopwatch
from gpuserve_worker.wire import Computed, Run


class Job(PipelinedBatch):
    """One batch: whose it is, and what there is of it at each stage. ``problem`` is why its inputs cannot be
    had.
    """

    def __init__(self, session: Session, run: Run) -> None:
        super().__init__(run.batch_id)
        self.session = session
        self.run = run
        #: Until it is staged, one that knows of no device.
        self.watch = Stopwatch()
        self.taken: TakenIn | None = None
        self.problem: RegionError | DeviceError | None = None
        self.finishing: Finishing | None = None


class Jobs:
    """All that have not ended. Any thread may call any method."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._pipeline: Pipeline[Job] = Pipeline()
        self._changed = threading.Condition()
        #: Held while inputs are brought on their way.
        self._staging = threading.Lock()
        self._is_over = False

    def __len__(self) -> int:
        """How many wait to be called."""
        return len(self._pipeline)

    @property
    def leaving(self) -> int:
        """How many have been called and are not answered."""
        return self._pipeline.leaving

    def keep(self, session: Session, run: Run) -> None:
        """One has come on a session."""
        with self._changed:
            self._pipeline.receive(Job(session, run))

    def clear(self) -> None:
        """The front that wanted those that wait is gone: what the device has of them is given back."""
        with self._changed:
            for job in self._pipeline.drop_waiting():
                job.taken = None

    def stage_ahead(self) -> None:
        """Bring the inputs of all that wait on their way."""
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
        if job.stage is Stage.RECEIVED:
            self._stage(job, ahead=False)
        with self._changed:
            if job.stage is not Stage.ARRIVING:
                job.taken = None
                return None
            self._pipeline.called(job)
        return job

    def returned(self, job: Job, nbytes: int) -> None:
        """Its call is over, and so many bytes are to be copied back."""
        with self._changed:
            self._pipeline.returned(job, nbytes)

    def computed(self, job: Job) -> None:
        """Its work on the device has ended well; the front is told, where that is of use."""
        with self._changed:
            announced = self._pipeline.computed(job)
        if announced is not None:
            announced.session.send(Computed((announced.batch_id,)))

    def answer(self, job: Job, reply: Reply) -> None:
        """Send the answer to the oldest that has not been answered."""
        job.session.reply(reply)
        with self._changed:
            self._pipeline.answered(job)
            self._changed.notify_all()

    def is_only_suspect(self, job: Job) -> bool:
        """Whether a fault of the device can be of nobody's doing but this one's."""
        with self._changed:
            return self._pipeline.is_only_suspect(job)

    def drain(self) -> None:
        """Wait until all that have been called are answered, or until ``give_up``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._pipeline.leaving)

    def give_up(self) -> None:
        """No more will be answered."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _stage(self, job: Job, *, ahead: bool) -> bool:
        """Whether its inputs are on their way, or never will be. What fails ``ahead`` is tried again in its
        turn: there may be more memory then.
        """
        with self._staging:
            if job.stage is not Stage.RECEIVED:
                return True
            taken: TakenIn | None = None
            job.session.leases.begin(job.batch_id)
            try:
                job.watch = self._execution.new_watch()
                taken = self._execution.take_in(job.session, job.run)
                job.watch.staged()
            except (RegionError, DeviceError) as error:
                if ahead:
                    return False
                job.problem = error
            with self._changed:
                if job.stage is Stage.RECEIVED:
                    job.taken = taken
                    self._pipeline.staged(job)
        return True
