"""The loop of a worker with a GPU whose callable just returns. Calls are made one at a time in its own
thread, as in ``running/loop.py``; while one is under way two more threads keep the device's copies going::

    staging thread    Run k+1: its inputs begin to go to the device
    own thread                 the callable, batch k
    reply thread                     batch k-1: its outputs have come; Done

With one batch in flight at a time the loop's own thread does all of it, and no other is woken. They come in
when a batch was there already at the end of the one before (``_is_busy``), or where this thread would wait
for the device.

A batch for which the device's memory does not suffice is run again in halves. When the process can use its
device no more, the batch that is to blame is told so, if it is known which one that is. All others are left
to the successor of this worker, by way of the front, and the loop ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from gpuserve_worker.calling.failure import DeviceFailure
from gpuserve_worker.calling.outputs import BatchAnswers
from gpuserve_worker.calling.request import Batch
from gpuserve_worker.calling.request_ids import enter_requests
from gpuserve_worker.calling.results import only_result, try_result
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.runtime import CudaError
from gpuserve_worker.cuda.jobs import Job, Jobs
from gpuserve_worker.cuda.recovery import CudaRecovery, is_out_of_memory
from gpuserve_worker.memory.regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.wire import WireFailure
from gpuserve_worker.running.batch_inputs import BatchInputs
from gpuserve_worker.running.execution import Execution, Stopwatch
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.reception import LinkReception
from gpuserve_worker.running.session import FrontSession
from gpuserve_worker.running.splitting import BatchPart, join_answers
from gpuserve_worker.running.supervision import Reporter

#: After so many batches by themselves the next one is expected to be so, too.
_QUIET: Final = 4
#: A thread that does not end within this time is at work on a device that does not answer any more.
_JOIN_S: Final = 5.0


class CudaLoop:
    """Runs the batches of one model on one GPU; implements ``WorkerLoop``."""

    def __init__(self, link: Link, model: Model, device: CudaDevice, reporter: Reporter) -> None:
        self._device = device
        self._reporter = reporter
        self._execution = Execution(model, reporter)
        self._jobs = Jobs(device, self._execution)
        self._reception: LinkReception[Job] = LinkReception(link, model, self._jobs)
        recovery = CudaRecovery(device, self._execution, model, reporter)
        self._loss = recovery.loss
        self._calls = DeviceCalls(model, device, self._execution, self._jobs, recovery)
        self._staging_thread = StagingThread(device, self._reception, self._jobs, self._end)
        self._reply_thread = ReplyThread(device, self._finish_behind, self._end)
        #: Whether a batch was there already when the one before had ended.
        self._is_busy = False
        #: How many batches have been the only one, one after the other.
        self._alone = 0
        #: Whether no batch may be called any more, also of those that are here.
        self._is_over = False

    @property
    def device_is_lost(self) -> bool:
        return bool(self._loss.text)

    def try_out(self, batch: Batch) -> None:
        self._calls.try_out(self._reception.session, batch)

    def run(self) -> None:
        reception = self._reception
        reception.begin()
        self._staging_thread.start()
        self._reply_thread.start()
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
            self._reply_thread.end()
            self._staging_thread.end()
            if self._loss.text:
                self._reporter.error(self._loss.last_words())

    def stop(self) -> None:
        self._reception.stop()

    def close(self) -> None:
        self._reception.close()
        self._device.close()

    def _next_job(self) -> Job | None:
        self._reception.receive_waiting()
        self._is_busy = bool(self._jobs)
        self._alone = 0 if self._is_busy or self._jobs.leaving else self._alone + 1
        return self._reception.next_batch()

    def _run(self, job: Job) -> None:
        self._reception.running = True
        if self._is_busy or self._jobs:
            self._staging_thread.arm()
        if self._is_lost_before(job):
            self._end(None)
            return
        answers = self._calls.answers(job)
        job.inputs = None
        if isinstance(answers, WireFailure):
            self._fail(job, answers)
        else:
            self._hand_back(job, answers)
        self._reception.running = False

    def _is_lost_before(self, job: Job) -> bool:
        """Whether the work of earlier batches has left the device unusable before this one is called."""
        try:
            last_watch = self._calls.last_watch
            if last_watch is not None and self._jobs.leaving:
                last_watch.has_computed()
            return False
        except CudaError:
            job.is_cleared = True  # while the others are judged
            self._jobs.drain()
            job.is_cleared = False
        return self._loss.find()

    def _hand_back(self, job: Job, answers: BatchAnswers) -> None:
        """Bring the outputs on their way, and see to it that somebody waits for them."""
        job.pending_reply = self._execution.begin_done(job.session, job.run, answers, job.watch)
        nbytes = _nbytes(answers)
        del answers  # outputs may be views of the inputs
        self._reception.receive_waiting()
        self._jobs.returned(job, nbytes)
        if self._has_others(job):
            self._reply_thread.take(job)
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
        """In the reply thread, wait for a batch while the work of later ones may go wrong."""
        is_to_blame = self._clear(job)
        self._finish(job, is_to_blame=is_to_blame)

    def _finish(self, job: Job, *, is_to_blame: bool = False) -> None:
        pending, job.pending_reply = job.pending_reply, None
        assert pending is not None
        reply = pending.wait()
        del pending
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
        """Answer a batch whose call gave no answers, once it is known how those before it ended."""
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
        """Tell the batch that is to blame for the loss of the device, if this is the one, and end."""
        if (is_to_blame or self._jobs.is_only_suspect(job)) and self._loss.take_blame():
            job.session.reply(wire.Failed(job.batch_id, self._loss.failure(), False))
        self._end(None)

    def _end(self, fault: BaseException | None) -> None:
        """Call and answer no batch any more; ``fault`` is of one of the threads."""
        self._is_over = True
        self._jobs.give_up()
        if fault is None:
            self._reception.stop()
        else:
            self._reception.fail(fault)


class DeviceCalls:
    """Calls one model's callable, in the loop's own thread."""

    def __init__(
        self, model: Model, device: CudaDevice, execution: Execution, jobs: Jobs, recovery: CudaRecovery
    ) -> None:
        self._model = model
        self._device = device
        self._execution = execution
        self._jobs = jobs
        self._recovery = recovery
        #: The watch of the batch that was called last.
        self.last_watch: Stopwatch | None = None

    def try_out(self, session: FrontSession, batch: Batch) -> None:
        """Call the callable on a warm-up batch; raises what it raises, or what goes wrong on the device."""
        try_result(self._call(self._execution.warm(session, batch)))
        self._device.enter()
        self._device.runtime.synchronize()  # what went wrong on it is told by now

    def answers(self, job: Job) -> BatchAnswers | WireFailure:
        inputs, job.inputs = job.inputs, None
        if inputs is None:
            return self._without_inputs(job)
        if inputs.failures and (refusals := inputs.refusals()) is not None:
            return refusals
        answers = self._attempt(job, job.run, inputs)
        del inputs
        return self._again(job) if answers is None else answers

    def _without_inputs(self, job: Job) -> BatchAnswers | WireFailure:
        """Try again without inputs that found no memory: a framework may keep for itself what they need."""
        if job.problem is None or not is_out_of_memory(job.problem):
            return self._refused(job)
        job.problem = None
        return self._again(job)

    def _refused(self, job: Job) -> WireFailure:
        problem, job.problem = job.problem, None
        assert problem is not None
        return self._recovery.failure(problem, job.run) or self._execution.failure(problem)

    def _attempt(
        self, job: Job, run: wire.Run, inputs: BatchInputs, *, is_last: bool = False
    ) -> BatchAnswers | WireFailure | None:
        if run.request_ids:
            enter_requests(run.request_ids)
        try:
            inputs.admit()
            if not is_last:
                job.watch.called()
                self.last_watch = job.watch
            batch = inputs.hand_over()
            result = only_result(self._call(batch))
            self._device.enter()  # the callable may have made another device the current one
            job.watch.returned()
            del batch  # now that the default stream is behind all that reads its arrays
            return self._execution.check(job.session, result, run, inputs, apart=is_last)
        except (SystemExit, KeyboardInterrupt):  # which mean the process, and end it
            raise
        except BaseException as error:  # user code may raise anything; its batch fails and nothing else
            with suppress(CudaError):
                self._device.enter()
            was_alone = not self._jobs.leaving and not self._jobs
            if is_last or not self._recovery.is_worth_it(error, run, was_alone=was_alone):
                known = self._recovery.failure(error, run)
                return known or self._execution.failure_of_call(error, job.session, inputs)
        finally:
            if run.request_ids:
                enter_requests(())
        return None

    def _call(self, batch: Batch) -> Any:
        return self._model.call(batch if self._execution.takes_batch else batch.as_list())

    def _again(self, job: Job) -> BatchAnswers | WireFailure:
        """Run a batch for which there was too little memory once more, when no other takes any."""
        self._jobs.drain()
        try:
            parts = self._recovery.parts(job.session, job.run)
        except (DeviceFailure, RegionError) as error:
            job.problem = error
            return self._refused(job)
        return join_answers(parts, [self._last_attempt(job, part) for part in parts])

    def _last_attempt(self, job: Job, part: BatchPart) -> BatchAnswers | WireFailure:
        answers = self._attempt(job, part.run, part.inputs, is_last=True)
        assert answers is not None, "a last attempt is not followed by another"
        return answers


class StagingThread(threading.Thread):
    """Receives while the callable runs, once it is told to; until something comes while it does not."""

    def __init__(
        self,
        device: CudaDevice,
        reception: LinkReception[Job],
        jobs: Jobs,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="gpuserve-staging", daemon=True)
        self._device = device
        self._reception = reception
        self._jobs = jobs
        self._on_fault = on_fault
        self._armed = threading.Event()
        self._is_over = False

    def arm(self) -> None:
        self._armed.set()

    def end(self) -> None:
        """End the thread. The link must have been told to receive nothing more."""
        self._is_over = True
        self._armed.set()
        self.join(_JOIN_S)

    def run(self) -> None:
        try:
            self._device.enter_beside()
            while self._waits():
                self._jobs.stage_ahead()
                self._reception.turn.receive_until(self._may_rest, self._receive)
        except BaseException as error:  # it is the loop's own thread that is to raise it
            self._on_fault(error)

    def _waits(self) -> bool:
        self._armed.wait()
        self._armed.clear()
        return not self._is_over

    def _may_rest(self) -> bool:
        reception = self._reception
        return not reception.running or reception.ended or reception.stopping

    def _receive(self) -> None:
        self._reception.receive()
        if self._reception.running:
            self._jobs.stage_ahead()


class ReplyThread(threading.Thread):
    """Waits for the outputs of batches, in the order in which they are given, and sends the replies."""

    def __init__(
        self, device: CudaDevice, finish: Callable[[Job], None], on_fault: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name="gpuserve-reply", daemon=True)
        self._device = device
        self._finish = finish
        self._on_fault = on_fault
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def take(self, job: Job) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        self._jobs.put(None)
        self.join(_JOIN_S)

    def run(self) -> None:
        try:
            self._device.enter_beside()
            while (job := self._jobs.get()) is not None:
                self._finish(job)
                del job
        except BaseException as error:  # it is the loop's own thread that is to raise it
            self._on_fault(error)


def _nbytes(answers: BatchAnswers) -> int:
    responses = [answers.whole] if answers.each is None else answers.each
    return sum([one.nbytes for outputs in responses if isinstance(outputs, list) for one in outputs])
