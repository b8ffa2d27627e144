"""The loop of a worker whose callable just returns: receive, run the batch, reply. One batch at a time,
in one thread, and nothing but system calls between the link and the callable. Callables that await or
yield have ``async_loop.py``.

Three phases, three ways to fail. A transport error ends the loop: without its peer a worker has no
work. Whatever user code raises becomes a reply. A fault of gpuserve itself, on either side of the link,
is caught nowhere and ends the process with its traceback.

::

    front -> Attach, Segment, DropSegment     the front's memory is mapped
    front -> Run       inputs.py -> the callable -> outputs.py       -> Done | Failed
    front -> Free      blocks of the output arena are taken back
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gpuserve_worker import wire
from gpuserve_worker.call_port import LinkPort
from gpuserve_worker.execution import Execution, Stopwatch
from gpuserve_worker.link import Link
from gpuserve_worker.model import Model
from gpuserve_worker.outputs import Answers
from gpuserve_worker.regions import RegionError
from gpuserve_worker.reporting import Report
from gpuserve_worker.request import Batch, BatchedOutputs
from gpuserve_worker.results import only_result, try_result
from gpuserve_worker.session import Reply, Session
from gpuserve_worker.turns import Turns
from gpuserve_worker.wire import WireError, WireFailure

#: What most callables return, and nothing has to be asked of.
_AT_HAND: Final = (BatchedOutputs, list)


class Loop:
    """Runs the batches of one model."""

    def __init__(self, link: Link, model: Model, report: Report) -> None:
        self._link = link
        self._model = model
        self._execution = Execution(model, report)
        self._session = self._new_session()
        self._stopping = False
        self._ended = False
        #: What a message did that must not have come.
        self._fault: Exception | None = None
        self._thread = 0
        self._running = False
        self._turns = Turns()
        #: Batches, each with whose it is. Some came while the callable, or a thread of it, waited for an
        #: answer of another model.
        self._backlog: deque[tuple[Session, wire.Run]] = deque()
        #: Sessions whose memory the batch at hand may still be using.
        self._retired: deque[Session] = deque()
        self._calls = LinkPort(model.context.calls, lambda: self._session, self._wait, self._is_own_thread)

    def try_out(self, batch: Batch) -> None:
        """Call the callable on a batch that nobody waits for; raises what it raises."""
        try_result(self._model.call(batch if self._execution.takes_batch else batch.as_list()))

    def run(self) -> None:
        """Serve until the peer is gone or ``stop`` is called.

        Raises:
            OSError: the peer went away while something was sent to it.
            WireError, ValueError, KeyError: the peer broke the protocol.
        """
        self._thread = threading.get_ident()
        while (batch := self._next_batch()) is not None:
            self._running = True
            self._run(*batch)
            self._running = False
        if self._fault is not None:
            raise self._fault

    def _next_batch(self) -> tuple[Session, wire.Run] | None:
        """The next batch; all else that comes before it is obeyed. None at the end."""
        while not self._stopping and self._fault is None:
            if self._retired:
                self._close_retired()
            if self._backlog:
                with suppress(IndexError):  # another thread has just obeyed an ``Attach``
                    return self._backlog.popleft()
            if self._ended:
                return None
            if self._turns.try_take():
                try:
                    if not self._backlog:  # else who had the turn has just put one there
                        self._receive()
                finally:
                    self._turns.give()
            else:
                self._wait(lambda: bool(self._backlog) or self._stopping)
        return None

    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Receive, or let another thread do so, until something is true or the peer is gone."""
        self._turns.receive_until(lambda: self._ended or ready(), self._receive)

    def _receive(self) -> None:
        """Take one message. A batch is for the loop to run, whichever thread it was that received it."""
        try:
            received = self._link.receive()
            if received is not None:
                self._obey(*received)
                return
        except (WireError, ValueError, KeyError) as error:  # not for the callable that may be waiting here
            self._fault = error
        self._ended = True
        self._calls.close()

    def _obey(self, message: wire.Message, fds: list[int]) -> None:
        try:
            self._take(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def stop(self) -> None:
        """Return from ``run`` once the batch at hand is answered. Called from another thread."""
        self._stopping = True
        self._link.stop_receiving()

    def close(self) -> None:
        """Give up the memory shared with the front, after ``run``, in a process that goes on."""
        self._calls.close()
        self._close_retired()
        self._session.close()

    def _take(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.Run():
                self._backlog.append((self._session, message))
            case wire.Answer():
                self._calls.take(message)
            case wire.Cancel():
                pass  # the batch ran before this was read: a plain function cannot be interrupted
            case wire.Attach(epoch):
                self._attach(epoch)
            case _:
                self._session.take_memory(message, fds)

    def _new_session(self) -> Session:
        return Session(self._link, read_only_inputs=self._model.read_only_inputs)

    def _attach(self, epoch: int) -> None:
        """Another front takes over. Who asks on the old session from now on is refused, and who has, failed:
        no question is left without an answer.
        """
        self._session.retire()
        self._retired.append(self._session)
        if self._is_own_thread() and not self._running:
            self._close_retired()
        self._backlog.clear()  # it was the front before that wanted them
        self._link.send(wire.Attached(epoch))
        self._session = self._new_session()
        self._calls.attached()

    def _close_retired(self) -> None:
        while self._retired:
            self._retired.popleft().close()

    def _run(self, session: Session, run: wire.Run) -> None:
        watch = Stopwatch()
        session.leases.begin(run.batch_id)
        answers = self._compute(session, run, watch)
        reply: Reply
        if isinstance(answers, WireFailure):
            reply = wire.Failed(run.batch_id, answers, False)
        else:
            reply = self._execution.done(session, run, answers, watch)
        del answers  # outputs may be views of the inputs
        session.reply(reply)
        if self._execution.tell_unrecoverable():
            self.stop()

    def _compute(self, session: Session, run: wire.Run, watch: Stopwatch) -> Answers | WireFailure:
        execution = self._execution
        try:
            taken = execution.take_in(session, run)
        except RegionError as error:
            return execution.failure(error)
        if taken.failures and (refusals := taken.refusals()) is not None:
            return refusals
        batch = taken.batch
        watch.called()
        try:
            result = self._model.call(batch if execution.takes_batch else batch.as_list())
            if type(result) not in _AT_HAND:
                result = only_result(result)
            watch.returned()
            return execution.check(session, result, run, taken)
        except (SystemExit, KeyboardInterrupt):  # which mean the process, and end it
            raise
        except BaseException as error:  # user code may raise anything; its batch fails and nothing else
            return execution.failure_of_call(error, session, taken)
