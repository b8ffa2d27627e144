"""The loop of a worker whose callable just returns: receive, run the batch, reply. One batch at a time,
in one thread, and nothing but system calls between the link and the callable. Callables that await or
yield have ``async_loop.py``; a worker with a device has the loop of its ``WorkerDevicePath``.

Three phases, three ways to fail. A transport error ends the loop: without its peer a worker has no
work. Whatever user code raises becomes a reply. A fault of gpuserve itself, on either side of the link,
is caught nowhere and ends the process with its traceback.

::

    front -> Attach, Segment, DropSegment     the front's memory is mapped         (reception.py)
    front -> Run       inputs.py -> the callable -> outputs.py       -> Done | Failed
    front -> Free      blocks of the output arena are taken back
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Final

from gpuserve_worker.calling.outputs import BatchAnswers
from gpuserve_worker.calling.request import Batch, BatchedOutputs, Request
from gpuserve_worker.calling.request_ids import enter_requests
from gpuserve_worker.calling.results import only_result, try_result
from gpuserve_worker.memory.regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.wire import WireFailure
from gpuserve_worker.running.execution import Execution, Stopwatch
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.reception import LinkReception
from gpuserve_worker.running.session import BatchReply, FrontSession
from gpuserve_worker.running.supervision import Reporter

#: What most callables return, and nothing has to be asked of.
_AT_HAND: Final = (BatchedOutputs, list)
#: The answer to a batch that took less may wait for that of the next one, expected to be as short.
_SHORT_NS: Final = 200_000
#: The first of several answers that leave together waits no longer, but for the batch that runs then.
_PATIENCE_NS: Final = 300_000
_NOTHING_RUNS: Final[tuple[int, Sequence[Request]]] = (-1, ())
_CANCELLED: Final = WireFailure("CANCELLED", "the request was cancelled")


class _WaitingBatches(deque[tuple[FrontSession, wire.Run]]):
    """What came while the callable ran; implements ``Backlog``. ``running`` is the batch that it runs, where
    it was given a list of requests.
    """

    running = _NOTHING_RUNS

    def keep(self, session: FrontSession, run: wire.Run) -> None:
        self.append((session, run))

    def take(self) -> tuple[FrontSession, wire.Run] | None:
        try:
            return self.popleft()
        except IndexError:  # another thread has just obeyed an ``Attach``
            return None

    def cancel(self, batch_id: int, position: int) -> None:
        running_id, requests = self.running
        if batch_id == running_id and position < len(requests):
            requests[position].cancelled = True
        for waiting in tuple(self):
            session, run = waiting
            if run.batch_id == batch_id and _is_by_itself(run):
                with suppress(ValueError):  # it has just begun in another thread
                    self.remove(waiting)
                    session.reply(wire.Failed(batch_id, _CANCELLED, True))

    def settle(self) -> None:
        """No thread but the loop's own uses a front's memory."""


class Loop:
    """Runs the batches of one model on the host; implements ``WorkerLoop``."""

    device_is_lost: Final = False

    def __init__(self, link: Link, model: Model, reporter: Reporter) -> None:
        self._model = model
        self._execution = Execution(model, reporter)
        self._backlog = _WaitingBatches()
        self._reception = LinkReception(link, model, self._backlog)
        #: When the first of the answers was ready that wait.
        self._held_since_ns = 0

    def try_out(self, batch: Batch) -> None:
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
        reception.raise_fault()

    def stop(self) -> None:
        self._reception.stop()

    def close(self) -> None:
        self._reception.close()

    def _run(self, session: FrontSession, run: wire.Run) -> None:
        if session.held and not run.may_wait:
            session.flush()  # a worker that dies under this batch takes no answer with it
        watch = Stopwatch()
        session.leases.begin(run.batch_id)
        answers = self._compute(session, run, watch)
        reply: BatchReply
        if isinstance(answers, WireFailure):
            reply = wire.Failed(run.batch_id, answers, False)
        else:
            reply = self._execution.done(session, run, answers, watch)
        del answers  # outputs may be views of the inputs
        is_last = not (run.may_wait or self._backlog)
        waits = not is_last and isinstance(reply, wire.Done) and self._waits(session, run, watch)
        session.reply(reply, waits=waits)
        if self._execution.tell_unrecoverable():
            self.stop()

    def _waits(self, session: FrontSession, run: wire.Run, watch: Stopwatch) -> bool:
        """Whether the answer to a batch waits for that of the next one, which is here."""
        now_ns = perf_counter_ns()
        if now_ns - watch.received_ns > _SHORT_NS:
            if self._backlog:
                self._reception.receive_waiting()  # some may not have to run any more
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
            enter_requests(run.request_ids)
        watch.called()
        try:
            if execution.takes_batch:
                result = self._model.call(batch)
            else:
                requests = batch.as_list()
                self._backlog.running = run.batch_id, requests
                result = self._model.call(requests)
            if type(result) not in _AT_HAND:
                result = only_result(result)
            watch.returned()
            return execution.check(session, result, run, inputs)
        except (SystemExit, KeyboardInterrupt):  # which mean the process, and end it
            raise
        except BaseException as error:  # user code may raise anything; its batch fails and nothing else
            return execution.failure_of_call(error, session, inputs)
        finally:
            if not execution.takes_batch:  # no request is kept longer than by who runs it
                self._backlog.running = _NOTHING_RUNS
            if run.request_ids:
                enter_requests(())


def _is_by_itself(run: wire.Run) -> bool:
    """Whether a batch is one request, and the callable misses nothing where it does not run."""
    if len(run.requests) > 1 or run.dropped:
        return False
    request = run.requests[0]
    return isinstance(request, int) or request[4] is None
