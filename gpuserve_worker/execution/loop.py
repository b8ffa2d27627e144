"""The loop of a worker whose callable returns plain results, and the device path without a device.

The loop receives a batch, runs it and replies: one batch at a time, in one thread, with only system calls
between the link and the callable. Callables that await or yield have ``async_loop.py``; a worker with a
device has the loop of its ``WorkerDevicePath``.

Three kinds of failures: a transport error ends the loop, because a worker without a peer has no work; an
exception of user code becomes a reply; a defect of gpuserve itself, on either side of the link, is not caught
and ends the process with its traceback.

::

    front -> Attach, Segment, DropSegment     the front's memory is mapped         (link_receiver.py)
    front -> Run       input arrays -> the callable -> output checks  -> Done | Failed
    front -> Free      blocks of the output arena are freed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Final

from gpuserve_worker.execution.batch_inputs import BatchPart
from gpuserve_worker.execution.device_path import Model, Recovery, Stopwatch
from gpuserve_worker.execution.execution import AT_HAND, Execution, only_result, try_result
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.link_receiver import BatchReceiver
from gpuserve_worker.execution.session import FrontSession, InputReader
from gpuserve_worker.inference.inference_request import Batch, Request
from gpuserve_worker.inference.outputs import BatchAnswers
from gpuserve_worker.inference.running_requests import enter_requests, leave_requests
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.memory.client_regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.wire import WireFailure

#: The reply to a batch that took less may wait for the reply of the next one, which is expected to be as
#: short.
_SHORT_NS: Final = 200_000
#: The first of several held replies waits no longer than this, plus the running batch.
_PATIENCE_NS: Final = 300_000
_NOTHING_RUNS: Final[tuple[int, Sequence[Request]]] = (-1, ())
_CANCELLED: Final = WireFailure("CANCELLED", "the request was cancelled")


class _WaitingBatches(deque[tuple[FrontSession, wire.Run]]):
    """Batches that arrived during a call, a ``Backlog``; ``running`` if given as a list of requests."""

    running = _NOTHING_RUNS

    def enqueue(self, session: FrontSession, run: wire.Run) -> None:
        self.append((session, run))

    def dequeue(self) -> tuple[FrontSession, wire.Run] | None:
        try:
            return self.popleft()
        except IndexError:  # another thread has just processed an
            return None

    def cancel(self, batch_id: int, position: int) -> None:
        running_id, requests = self.running
        if batch_id == running_id and position < len(requests):
            requests[position].cancelled = True
        for waiting in tuple(self):
            session, run = waiting
            if run.batch_id == batch_id and _is_by_itself(run):
                with suppress(ValueError):  # another thread has just started it
                    self.remove(waiting)
                    session.reply(wire.Failed(batch_id, _CANCELLED, True))

    def wait_idle(self) -> None:
        """Do nothing: only the loop's own thread uses a front's memory."""


class Loop:
    """The loop that runs the batches of one model on the host, one at a time; implements ``WorkerLoop``."""

    device_is_lost: Final = False

    def __init__(self, link: Link, model: Model, reporter: Reporter) -> None:
        self._model = model
        self._execution = Execution(model, reporter)
        self._backlog = _WaitingBatches()
        self._reception = BatchReceiver(link, model, self._backlog)
        #: Time at which the first of the held replies was ready.
        self._held_since_ns = 0

    def run_warmup(self, batch: Batch) -> None:
        batch = self._execution.warm(self._reception.session, batch)
        try_result(self._model.call(batch if self._execution.takes_batch else batch.as_list()))

    def run(self) -> None:
        reception = self._reception
        reception.begin()
        try:
            while (batch := reception.next_batch()) is not None:
                reception.running = True
                self._run(*batch)
                reception.running = False
        finally:
            with suppress(OSError):  # the front is gone
                reception.session.flush()
        reception.raise_error()

    def stop(self) -> None:
        self._reception.stop()

    def close(self) -> None:
        self._reception.close()

    def _run(self, session: FrontSession, run: wire.Run) -> None:
        if session.held and not run.may_wait:
            session.flush()  # so that the death of the worker during this batch loses no reply
        watch = Stopwatch()
        session.leases.begin(run.batch_id)
        answers = self._compute(session, run, watch)
        reply: wire.BatchReply
        if isinstance(answers, WireFailure):
            reply = wire.Failed(run.batch_id, answers, False)
        else:
            reply = self._execution.done(session, run, answers, watch)
        del answers  # outputs may be views of the inputs, whose lease must end
        is_last = not (run.may_wait or self._backlog)
        waits = not is_last and isinstance(reply, wire.Done) and self._waits(session, run, watch)
        session.reply(reply, waits=waits)
        if self._execution.report_unrecoverable():
            self.stop()

    def _waits(self, session: FrontSession, run: wire.Run, watch: Stopwatch) -> bool:
        """Return whether the reply to a batch waits for the reply of the next one, which has arrived."""
        now_ns = perf_counter_ns()
        if now_ns - watch.received_ns > _SHORT_NS:
            if self._backlog:
                self._reception.receive_waiting()  # cancellations may have arrived
            return False
        if not run.may_wait:
            return False
        if not self._backlog:
            self._reception.receive_waiting()
        if not session.held:
            self._held_since_ns = now_ns
        return bool(self._backlog) and now_ns - self._held_since_ns < _PATIENCE_NS

    def _compute(self, session: FrontSession, run: wire.Run, watch: Stopwatch) -> BatchAnswers | WireFailure:
        execution = self._execution
        try:
            inputs = execution.read_inputs(session, run)
        except RegionError as error:
            return execution.failure(error)
        if inputs.failures and (refusals := inputs.refusals()) is not None:
            return refusals
        batch = inputs.batch
        if run.request_ids:
            enter_requests(run.request_ids, run.traces)
        execution.start(session, run)
        watch.called()
        try:
            if execution.takes_batch:
                result = self._model.call(batch)
            else:
                requests = batch.as_list()
                if self._model.rank is None:  # other ranks learn of no cancellation
                    self._backlog.running = run.batch_id, requests
                result = self._model.call(requests)
            if type(result) not in AT_HAND:
                result = only_result(result)
            watch.returned()
            return execution.check(session, result, run, inputs)
        except (SystemExit, KeyboardInterrupt):  # which end the process
            raise
        except BaseException as error:  # user code may raise anything; only its batch fails
            return execution.failure_of_call(error, session, inputs)
        finally:
            if not execution.takes_batch:  # keep no request alive after its batch
                self._backlog.running = _NOTHING_RUNS
            if run.request_ids:
                leave_requests()


def _is_by_itself(run: wire.Run) -> bool:
    """Return whether a batch is one request that need not run for the state of its sequence."""
    if len(run.requests) > 1 or run.dropped:
        return False
    request = run.requests[0]
    return isinstance(request, int) or request[4] is None


class HostPath:
    """The path of a callable on the host, a ``WorkerDevicePath``: nothing is staged or copied."""

    page_locks: Final = None
    spares: Final = None
    reader: Final = None
    new_watch = Stopwatch
    new_loop = Loop

    def open_session(self, front: FrontSession, arena: Arena) -> None:
        return None

    def enter_concurrently(self) -> None:
        return None

    def new_recovery(self, read_inputs: InputReader, model: Model, reporter: Reporter) -> Recovery:
        return _NoRecovery()

    def release_memory(self) -> None:
        return None

    def close(self) -> None:
        return None


class _NoRecovery:
    """A recovery without a device, which never retries; implements ``Recovery``."""

    device_is_lost: Final = False

    def should_retry(self, error: BaseException, run: wire.Run, *, was_alone: bool) -> bool:
        return False

    def parts(self, session: FrontSession, run: wire.Run) -> list[BatchPart]:
        raise AssertionError("nothing is worth another run on the host")

    def failure(self, error: BaseException, run: wire.Run) -> None:
        return None

    async def resolve_failure(self, failed: wire.Failed, *, was_alone: bool) -> wire.Failed:
        return failed
