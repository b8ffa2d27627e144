"""The loop of a worker with a device whose callable just returns. Calls are made one at a time in its own
thread, as in ``loop.py``; while one is under way two more threads keep the device's copies going::

    intake thread     Run k+1: its inputs begin to go to the device
    own thread                 the callable, batch k
    finisher thread                  batch k-1: its outputs have come; Done

With one batch in flight at a time the loop's own thread does all of it, and no other is woken. They come in
when a batch was there already at the end of the one before (``_is_busy``), or where this thread would wait
for the device.

A batch for which the device's memory does not suffice is run again in halves. When the process can use its
device no more, the batch that is to blame is told so, if it is known which one that is. All others are left
to the successor of this worker, by way of the front, and the loop ends.
"""

from __future__ import annotations

import select
from contextlib import suppress
from typing import Any, Final

from gpuserve_worker import wire
from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.device_threads import Finisher, Intake
from gpuserve_worker.cuda.faults import Loss, is_out_of_memory
from gpuserve_worker.cuda.jobs import Job, Jobs
from gpuserve_worker.cuda.runtime import CudaError
from gpuserve_worker.cuda.second_run import SecondRun
from gpuserve_worker.execution import Execution
from gpuserve_worker.failure import DeviceError
from gpuserve_worker.halves import Part, joined
from gpuserve_worker.intake import TakenIn
from gpuserve_worker.link import Link
from gpuserve_worker.model import Model
from gpuserve_worker.outputs import Answers
from gpuserve_worker.reception import Reception
from gpuserve_worker.regions import RegionError
from gpuserve_worker.reporting import Report
from gpuserve_worker.request import Batch
from gpuserve_worker.results import only_result, try_result
from gpuserve_worker.session import Session
from gpuserve_worker.stopwatch import Stopwatch
from gpuserve_worker.wire import WireFailure

#: After so many batches by themselves the next one is expected to be so, too.
_QUIET: Final = 4


class DeviceLoop:
    """Runs the batches of one model on one device."""

    def __init__(self, link: Link, model: Model, device: Device, report: Report) -> None:
        self._link = link
        self._model = model
        self._device = device
        self._report = report
        self._execution = Execution(model, report)
        self._jobs = Jobs(self._execution)
        self._reception: Reception[Job] = Reception(
            link,
            model.context.calls,
            self._jobs,
            lambda: Session(link, read_only_inputs=model.read_only_inputs, device=device),
            self._settle,
        )
        self._second_run = SecondRun(device, self._execution, model, report)
        self._loss = Loss(device, model.name, model.context.instance)
        self._intake = Intake(device, self._reception, self._jobs, self._end)
        self._finisher = Finisher(device, self._finish_behind, self._end)
        self._readable = select.poll()
        #: That of the batch that was called last.
        self._last_watch: Stopwatch | None = None
        #: Whether a batch was there already when the one before had ended.
        self._is_busy = False
        #: How many batches have been the only one, one after the other.
        self._alone = 0
        #: Whether no batch may be called any more, also of those that are here.
        self._is_over = False

    @property
    def device_is_lost(self) -> bool:
        """After ``run``: whether it ended because this process can use its device no more."""
        return bool(self._loss.text)

    def try_out(self, batch: Batch) -> None:
        """Call the callable on a batch that nobody waits for; raises what it raises."""
        batch = self._execution.warm(self._reception.session, batch)
        try_result(self._model.call(batch if self._execution.takes_batch else batch.as_list()))
        self._device.enter()
        self._device.runtime.synchronize()  # what went wrong on it is told by now

    def run(self) -> None:
        """Serve until the peer is gone or ``stop`` is called; raises as ``Loop.run``."""
        self._readable.register(self._link.fileno(), select.POLLIN)
        reception = self._reception
        reception.begin()
        self._intake.start()
        self._finisher.start()
        try:
            while (job := self._next_job()) is not None:
                self._run(job)
            while not self._is_over and (job := self._jobs.take()) is not None:
                self._run(job)  # its inputs are on the device, and its front waits for it here
            self._jobs.drain()
            reception.raise_fault()
        except CudaError:  # not of a batch: a client's memory was to be opened
            if not self._loss.find():
                raise
        finally:
            reception.stop()
            self._finisher.end()
            self._intake.end()
            if self._loss.text:
                self._report.error(self._loss.last_words())

    def stop(self) -> None:
        """Return from ``run`` once the batches at hand are answered. Called from another thread."""
        self._reception.stop()

    def close(self) -> None:
        """Give up the memory shared with the front, after ``run``, in a process that goes on."""
        self._reception.close()
        self._device.close()

    # ---- what comes -----------------------------------------------------------------------

    def _next_job(self) -> Job | None:
        self._look()
        self._is_busy = bool(self._jobs)
        self._alone = 0 if self._is_busy or self._jobs.leaving else self._alone + 1
        return self._reception.next_batch()

    def _look(self) -> None:
        """Obey what has come by now, if nobody else is receiving."""
        reception = self._reception
        while not reception.ended and reception.turns.try_take():
            try:
                if not self._readable.poll(0):
                    return
                reception.receive()
            finally:
                reception.turns.give()

    def _settle(self) -> None:
        """Nothing is copied from or to a front's memory any more."""
        self._jobs.drain()
        with suppress(CudaError):  # after one nothing is copied any more
            self._device.enter()
            self._device.settle()

    # ---- one batch ------------------------------------------------------------------------

    def _run(self, job: Job) -> None:
        self._reception.running = True
        if self._is_busy or self._jobs:
            self._intake.arm()
        if self._is_lost_before(job):
            self._end(None)
            return
        answers = self._compute(job)
        job.taken = None
        if isinstance(answers, WireFailure):
            self._fail(job, answers)
        else:
            self._hand_back(job, answers)
        self._reception.running = False

    def _is_lost_before(self, job: Job) -> bool:
        """Whether the work of earlier batches has left the device unusable before this one is called."""
        try:
            if self._last_watch is not None and self._jobs.leaving:
                self._last_watch.has_computed()
            return False
        except CudaError:
            job.is_cleared = True  # while the others are judged
            self._jobs.drain()
            job.is_cleared = False
        return self._loss.find()

    def _hand_back(self, job: Job, answers: Answers) -> None:
        """Bring the outputs on their way, and see to it that somebody waits for them."""
        job.finishing = self._execution.begin_done(job.session, job.run, answers, job.watch)
        nbytes = _nbytes(answers)
        del answers  # outputs may be views of the inputs
        self._look()
        self._jobs.returned(job, nbytes)
        if self._has_others(job):
            self._finisher.take(job)
        else:
            self._finish(job)

    def _has_others(self, job: Job) -> bool:
        """Whether this thread has, or may soon have, something better to do than to wait for a batch."""
        if self._is_busy or self._jobs or self._jobs.leaving > 1:
            return True
        try:
            return self._alone < _QUIET and not job.watch.has_computed()
        except CudaError:  # which whoever waits for it tells
            return False

    def _finish_behind(self, job: Job) -> None:
        """In the finisher's thread: the work of later batches may go wrong meanwhile."""
        is_to_blame = self._clear(job)
        self._finish(job, is_to_blame=is_to_blame)

    def _finish(self, job: Job, *, is_to_blame: bool = False) -> None:
        """Wait for the outputs, and send the answer."""
        finishing, job.finishing = job.finishing, None
        assert finishing is not None
        reply = finishing.wait()
        del finishing
        if isinstance(reply, wire.Failed) and self._loss.find():
            self._give_up(job, is_to_blame=is_to_blame)
        elif not self._is_over:
            self._jobs.answer(job, reply)

    def _clear(self, job: Job) -> bool:
        """Wait for the batch's work on the device; True: that has gone wrong, and was still going well when
        the work of all batches before was over.
        """
        was_well = False
        try:
            if not job.watch.has_computed():
                was_well = True
                job.watch.wait_computed()
        except CudaError:
            return was_well
        self._jobs.computed(job)
        return False

    def _fail(self, job: Job, failure: WireFailure) -> None:
        """The call gave no answers. Those before it are told first, as it may have to be known how they
        ended.
        """
        self._jobs.drain()
        lost = self._loss.find()
        self._jobs.returned(job, 0)
        if lost:
            self._give_up(job)
            return
        self._jobs.answer(job, wire.Failed(job.batch_id, failure, False))
        if self._execution.tell_unrecoverable():
            self._is_over = True
            self.stop()

    def _give_up(self, job: Job, *, is_to_blame: bool = False) -> None:
        """The device is lost: tell the batch that is to blame, if this is the one, and end."""
        if (is_to_blame or self._jobs.is_only_suspect(job)) and self._loss.take_blame():
            job.session.reply(wire.Failed(job.batch_id, self._loss.failure(), False))
        self._end(None)

    def _end(self, fault: BaseException | None) -> None:
        """No batch is called or answered any more; ``fault`` is of one of the threads."""
        self._is_over = True
        self._jobs.give_up()
        if fault is None:
            self._reception.stop()
        else:
            self._reception.fail(fault)

    # ---- the call -------------------------------------------------------------------------

    def _compute(self, job: Job) -> Answers | WireFailure:
        """The answers to a batch, which may have to be run twice."""
        taken, job.taken = job.taken, None
        if taken is None:
            return self._not_taken_in(job)
        if taken.failures and (refusals := taken.refusals()) is not None:
            return refusals
        answers = self._attempt(job, job.run, taken)
        del taken
        return self._again(job) if answers is None else answers

    def _not_taken_in(self, job: Job) -> Answers | WireFailure:
        """Where the inputs found no memory, a framework may keep for itself what they need."""
        if job.problem is None or not is_out_of_memory(job.problem):
            return self._refused(job)
        job.problem = None
        return self._again(job)

    def _refused(self, job: Job) -> WireFailure:
        """The inputs could not be had."""
        problem, job.problem = job.problem, None
        assert problem is not None
        if is_out_of_memory(problem):
            return self._second_run.no_room(job.run, problem)
        return self._execution.failure(problem)

    def _attempt(
        self, job: Job, run: wire.Run, taken: TakenIn, *, is_last: bool = False
    ) -> Answers | WireFailure | None:
        """Call the callable; None: there was too little memory, and it is to be called again."""
        try:
            taken.admit()
            if not is_last:
                job.watch.called()
                self._last_watch = job.watch
            result = only_result(self._call(taken.batch))
            self._device.enter()  # the callable may have made another device the current one
            job.watch.returned()
            return self._execution.check(job.session, result, run, taken, apart=is_last)
        except (SystemExit, KeyboardInterrupt):  # which mean the process, and end it
            raise
        except BaseException as error:  # user code may raise anything; its batch fails and nothing else
            with suppress(CudaError):
                self._device.enter()
            if not is_out_of_memory(error):
                return self._execution.failure_of_call(error, job.session, taken)
            was_alone = not self._jobs.leaving and not self._jobs
            if is_last or not self._second_run.is_possible(run, was_alone=was_alone):
                return self._second_run.no_room(run, error)
        return None

    def _call(self, batch: Batch) -> Any:
        return self._model.call(batch if self._execution.takes_batch else batch.as_list())

    def _again(self, job: Job) -> Answers | WireFailure:
        """Run a batch for which there was too little memory once more, when no other takes any."""
        self._jobs.drain()
        try:
            parts = self._second_run.parts(job.session, job.run)
        except (DeviceError, RegionError) as error:
            job.problem = error
            return self._refused(job)
        return joined(parts, [self._last_attempt(job, part) for part in parts])

    def _last_attempt(self, job: Job, part: Part) -> Answers | WireFailure:
        answers = self._attempt(job, part.run, part.taken, is_last=True)
        assert answers is not None, "a last attempt is not followed by another"
        return answers


def _nbytes(answers: Answers) -> int:
    """How many bytes the outputs have."""
    responses = [answers.whole] if answers.each is None else answers.each
    return sum([one.nbytes for outputs in responses if isinstance(outputs, list) for one in outputs])
