"""The loop of a worker with a GPU whose callable returns plain results. The loop's own thread makes one call
at a time, as in ``execution/loop.py``. During a call, two more threads handle the device's copies::

    staging thread    Run k+1: its inputs begin to go to the device
    own thread                 the callable, batch k
    reply thread                     batch k-1: wait for its outputs; Done

With one batch at a time the loop's own thread does all of this, and wakes no other. The other threads are
used if a batch was waiting when the previous one returned (``_is_busy``), or if this thread would block on
the device.

A batch that is too large for the device's memory runs again in halves. If the process loses its device, the
batch that caused the loss fails, if it is known. The front runs all other batches on the successor of this
worker, and the loop ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.runtime import CudaError
from gpuserve_worker.cuda.pipeline import Job, Jobs
from gpuserve_worker.cuda.recovery import CudaRecovery, is_out_of_memory
from gpuserve_worker.execution.batch_inputs import BatchInputs, BatchPart, join_answers
from gpuserve_worker.execution.device_path import Model, Stopwatch
from gpuserve_worker.execution.execution import AT_HAND, Execution, is_deferred, only_result, try_result
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.link_receiver import BatchReceiver
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.inference.failure import DeviceFailure
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.outputs import BatchAnswers
from gpuserve_worker.inference.running_requests import enter_requests, leave_requests
from gpuserve_worker.memory.client_regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.wire import WireFailure

#: After this many single batches the next one is expected to be single too.
_QUIET: Final = 4
#: A thread that does not end within this time is blocked by a device that no longer responds.
_JOIN_S: Final = 5.0


class CudaLoop:
    """The loop that runs the batches of one model on one GPU; implements ``WorkerLoop``."""

    def __init__(self, link: Link, model: Model, device: CudaDevice, reporter: Reporter) -> None:
        self._device = device
        self._reporter = reporter
        self._execution = Execution(model, reporter)
        self._jobs = Jobs(device, self._execution)
        self._reception: BatchReceiver[Job] = BatchReceiver(link, model, self._jobs)
        recovery = CudaRecovery(device, self._execution.read_inputs, model, reporter)
        self._loss = recovery.loss
        self._calls = DeviceCalls(model, device, self._execution, self._jobs, recovery)
        self._staging_thread = StagingThread(device, self._reception, self._jobs, self._end)
        self._reply_thread = ReplyThread(device, self._finish_behind, self._end)
        #: Whether a batch was waiting when the previous one returned. One that comes later may be the answer
        #: of a client to the reply, which needs no second thread.
        self._is_busy = False
        #: Number of consecutive single batches.
        self._alone = 0
        #: Whether no further batch may run, including received ones.
        self._is_over = False

    @property
    def device_is_lost(self) -> bool:
        return bool(self._loss.text)

    def run_warmup(self, batch: Batch) -> None:
        self._calls.run_warmup(self._reception.session, batch)

    def run(self) -> None:
        reception = self._reception
        reception.begin()
        self._staging_thread.start()
        self._reply_thread.start()
        try:
            while (job := self._next_job()) is not None:
                self._run(job)
            while not self._is_over and (job := self._jobs.dequeue()) is not None:
                self._run(job)  # its inputs are on the device, and its front waits for it
            self._jobs.drain()
            reception.raise_error()
        except CudaError:  # not caused by a batch: while a client's memory was opened
            if not self._loss.find():
                raise
        finally:
            reception.stop()
            self._reply_thread.end()
            self._staging_thread.end()
            if self._loss.text:
                self._reporter.error(self._loss.log_text_of_loss())

    def stop(self) -> None:
        self._reception.stop()

    def close(self) -> None:
        self._reception.close()
        self._device.close()

    def _next_job(self) -> Job | None:
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
        """Return whether earlier batches have left the device unusable before this one is called."""
        try:
            last_watch = self._calls.last_watch
            if last_watch is not None and self._jobs.leaving:
                last_watch.has_computed()
            return False
        except CudaError:
            job.is_cleared = True  # excluded while the cause is searched
            self._jobs.drain()
            job.is_cleared = False
        return self._loss.find()

    def _hand_back(self, job: Job, answers: BatchAnswers) -> None:
        """Start the copies of the outputs, and choose the thread that waits for them."""
        job.pending_reply = self._execution.start_reply(job.session, job.run, answers, job.watch)
        nbytes = _nbytes(answers)
        del answers  # outputs may be views of the inputs, whose lease must end
        self._reception.receive_waiting()
        was_busy, self._is_busy = self._is_busy, bool(self._jobs)
        self._jobs.returned(job, nbytes)
        if was_busy or self._has_others(job):
            self._reply_thread.enqueue(job)
        else:
            self._finish(job)

    def _has_others(self, job: Job) -> bool:
        """Return whether this thread has, or may soon have, other work than waiting for a batch."""
        if self._is_busy or self._jobs.leaving > 1:
            return True
        try:
            return self._alone < _QUIET and not job.watch.has_computed()
        except CudaError:  # the thread that waits for the batch reports the error
            return False

    def _finish_behind(self, job: Job) -> None:
        """Wait for a batch in the reply thread, while the work of later batches may fail."""
        with suppress(CudaError):  # of this batch, or of a later one that began meanwhile
            if not job.watch.has_computed():
                job.watch.wait_computed()
            self._jobs.computed(job)
        self._finish(job)

    def _finish(self, job: Job) -> None:
        pending, job.pending_reply = job.pending_reply, None
        assert pending is not None
        reply = pending.wait()
        del pending
        if isinstance(reply, wire.Failed) and self._loss.find():
            self._abort(job)
        elif not self._is_over:
            self._jobs.answer(job, reply)

    def _fail(self, job: Job, failure: WireFailure) -> None:
        """Reply to a batch whose call failed, when the outcome of earlier batches is known."""
        self._jobs.drain()
        lost = self._loss.find()
        self._jobs.returned(job, 0)
        if lost:
            self._abort(job)
            return
        self._jobs.answer(job, wire.Failed(job.batch_id, failure, False))
        if self._execution.report_unrecoverable():
            self._is_over = True
            self.stop()

    def _abort(self, job: Job) -> None:
        """Fail the batch that caused the loss of the device, if this is the one, and end the loop."""
        if self._jobs.is_only_possible_cause(job) and self._loss.claim_blame():
            job.session.reply(wire.Failed(job.batch_id, self._loss.failure(), False))
        self._end(None)

    def _end(self, fault: BaseException | None) -> None:
        """Run and answer no further batch. ``fault`` is that of a thread."""
        self._is_over = True
        self._jobs.abort()
        if fault is None:
            self._reception.stop()
        else:
            self._reception.fail(fault)


class DeviceCalls:
    """The calls of one model's callable, in the loop's own thread."""

    def __init__(
        self, model: Model, device: CudaDevice, execution: Execution, jobs: Jobs, recovery: CudaRecovery
    ) -> None:
        self._model = model
        self._device = device
        self._execution = execution
        self._jobs = jobs
        self._recovery = recovery
        #: Stopwatch of the last called batch.
        self.last_watch: Stopwatch | None = None

    def run_warmup(self, session: FrontSession, batch: Batch) -> None:
        """Call the callable on a warm-up batch. Raise its exceptions, and errors of the device."""
        batch = self._execution.warm(session, batch)
        result = self._call(batch)
        if is_deferred(result):
            try_result(result)
        else:
            self._execution.try_outputs(result, batch)
        self._device.enter()
        self._device.runtime.synchronize()  # reports errors of the device

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
        """Retry a transfer that found no memory: a framework may hold free memory in its cache."""
        problem = job.problem
        if problem is None or not is_out_of_memory(problem) or self._model.rank is not None:
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
            enter_requests(run.request_ids, run.traces)
        try:
            inputs.admit()
            if not is_last:
                job.watch.called()
                self.last_watch = job.watch
            self._execution.start(job.session, run)
            batch = inputs.detach_batch()
            result = self._call(batch)
            if type(result) not in AT_HAND:
                result = only_result(result)
            self._device.enter()  # the callable may have selected another device
            job.watch.returned()
            del batch  # the default stream is ordered after all work that reads its arrays
            return self._execution.check(job.session, result, run, inputs, apart=is_last)
        except (SystemExit, KeyboardInterrupt):  # which end the process
            raise
        except BaseException as error:  # user code may raise anything; only its batch fails
            with suppress(CudaError):
                self._device.enter()
            was_alone = not self._jobs.leaving and not self._jobs
            is_last |= self._model.rank is not None  # ranks run a batch once, or out of step
            if is_last or not self._recovery.should_retry(error, run, was_alone=was_alone):
                known = self._recovery.failure(error, run)
                return known or self._execution.failure_of_call(error, job.session, inputs)
        finally:
            if run.request_ids:
                leave_requests()
        return None

    def _call(self, batch: Batch) -> Any:
        return self._model.call(batch if self._execution.takes_batch else batch.as_list())

    def _again(self, job: Job) -> BatchAnswers | WireFailure:
        """Run a batch again that was too large for the memory, while no other batch runs."""
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
    """A thread that receives while the callable runs, from ``arm()`` until the call ends."""

    def __init__(
        self,
        device: CudaDevice,
        reception: BatchReceiver[Job],
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
        """End the thread. The link must have been told to stop receiving."""
        self._is_over = True
        self._armed.set()
        self.join(_JOIN_S)

    def run(self) -> None:
        try:
            self._device.enter_concurrently()
            reception = self._reception
            while self._waits():
                self._jobs.stage_waiting()
                reception.turn.receive_until(
                    lambda: not reception.running or reception.ended or reception.stopping, self._receive
                )
        except BaseException as error:  # the loop's own thread raises it
            self._on_fault(error)

    def _waits(self) -> bool:
        self._armed.wait()
        self._armed.clear()
        return not self._is_over

    def _receive(self) -> None:
        self._reception.receive()
        if self._reception.running:
            self._jobs.stage_waiting()


class ReplyThread(threading.Thread):
    """A thread that waits for the outputs of batches in order and sends the replies."""

    def __init__(
        self, device: CudaDevice, finish: Callable[[Job], None], on_fault: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name="gpuserve-reply", daemon=True)
        self._device = device
        self._finish = finish
        self._on_fault = on_fault
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def enqueue(self, job: Job) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        self._jobs.put(None)
        self.join(_JOIN_S)

    def run(self) -> None:
        try:
            self._device.enter_concurrently()
            while (job := self._jobs.get()) is not None:
                self._finish(job)
                del job
        except BaseException as error:  # the loop's own thread raises it
            self._on_fault(error)


def _nbytes(answers: BatchAnswers) -> int:
    responses = [answers.whole] if answers.each is None else answers.each
    nbytes = 0
    for outputs in responses:
        for one in outputs if isinstance(outputs, list) else ():
            nbytes += one.nbytes
    return nbytes
