"""The loop of a worker whose callable just returns: receive, run the batch, reply. One batch at a time,
in one thread, and nothing but system calls between the link and the callable. Callables that await or
yield have ``async_loop.py``; a worker with a device has ``cuda/device_loop.py``.

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
from typing import Final

from gpuserve_worker import wire
from gpuserve_worker.execution import Execution
from gpuserve_worker.link import Link
from gpuserve_worker.model import Model
from gpuserve_worker.outputs import Answers
from gpuserve_worker.reception import Reception
from gpuserve_worker.regions import RegionError
from gpuserve_worker.reporting import Report
from gpuserve_worker.request import Batch, BatchedOutputs
from gpuserve_worker.results import only_result, try_result
from gpuserve_worker.session import Reply, Session
from gpuserve_worker.stopwatch import Stopwatch
from gpuserve_worker.wire import WireFailure

#: What most callables return, and nothing has to be asked of.
_AT_HAND: Final = (BatchedOutputs, list)


class _Waiting(deque[tuple[Session, wire.Run]]):
    """Batches, each with whose it is. More than one came while the callable, or a thread of it, waited for an
    answer of another model.
    """

    def keep(self, session: Session, run: wire.Run) -> None:
        self.append((session, run))

    def take(self) -> tuple[Session, wire.Run] | None:
        try:
            return self.popleft()
        except IndexError:  # another thread has just obeyed an ``Attach``
            return None


class Loop:
    """Runs the batches of one model."""

    #: It has none.
    device_is_lost: Final = False

    def __init__(self, link: Link, model: Model, report: Report) -> None:
        self._model = model
        self._execution = Execution(model, report)
        self._reception: Reception[tuple[Session, wire.Run]] = Reception(
            link,
            model.context.calls,
            _Waiting(),
            lambda: Session(link, read_only_inputs=model.read_only_inputs),
            _nothing,
        )

    def try_out(self, batch: Batch) -> None:
        """Call the callable on a batch that nobody waits for; raises what it raises."""
        batch = self._execution.warm(self._reception.session, batch)
        try_result(self._model.call(batch if self._execution.takes_batch else batch.as_list()))

    def run(self) -> None:
        """Serve until the peer is gone or ``stop`` is called.

        Raises:
            OSError: the peer went away while something was sent to it.
            WireError, ValueError, KeyError: the peer broke the protocol.
        """
        reception = self._reception
        reception.begin()
        while (batch := reception.next_batch()) is not None:
            reception.running = True
            self._run(*batch)
            reception.running = False
        reception.raise_fault()

    def stop(self) -> None:
        """Return from ``run`` once the batch at hand is answered. Called from another thread."""
        self._reception.stop()

    def close(self) -> None:
        """Give up the memory shared with the front, after ``run``, in a process that goes on."""
        self._reception.close()

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


def _nothing() -> None:
    """No thread but the loop's own uses a front's memory."""
