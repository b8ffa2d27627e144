"""What a worker's loop hears on its link, whichever of its threads receives: batches are kept for the loop,
all else is obeyed at once. No callable is called here, and no batch is run.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.wire import WireError
from gpuserve_worker.running.call_port import LinkPort
from gpuserve_worker.running.metric_port import MetricPort
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.session import FrontSession

_Kept = TypeVar("_Kept")
_Kept_co = TypeVar("_Kept_co", covariant=True)


class Backlog(Protocol[_Kept_co]):
    """The batches that have come and are not run yet."""

    def __len__(self) -> int: ...

    def keep(self, session: FrontSession, run: wire.Run) -> None:
        """Add a batch that has come on a session."""

    def take(self) -> _Kept_co | None:
        """The oldest, which is to be run now; None where there is none."""

    def cancel(self, batch_id: int, position: int) -> None:
        """Nobody waits for one request of a batch any more: it need not run, if that was its only one. One
        that runs may ask whether it is so.
        """

    def clear(self) -> None:
        """Drop those that nobody is to run here."""

    def settle(self) -> None:
        """Wait until no thread but the loop's own uses the memory of a front that is gone."""


class ReceivingTurn:
    """The turn to receive from the link, taken by one thread at a time. No message is understood here. The
    loop receives batches. A callable that asks another model waits for its answer, in the loop's own thread
    or in another that it started. Whoever waits receives for all.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._waiting = 0

    def try_take(self) -> bool:
        """Take the turn if nobody has it. Without a waiting thread this and ``give`` cost next to nothing."""
        return self._turn.acquire(blocking=False)

    def give(self) -> None:
        """Let those that wait receive, or find that what they waited for has come."""
        self._turn.release()
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def receive_until(self, ready: Callable[[], bool], receive: Callable[[], None]) -> None:
        """Return when something is true, which a message may make it; ``receive`` takes one."""
        with self._changed:
            self._waiting += 1  # before the look at the turn, so that who gives it up tells of it
        try:
            while not ready():
                if self.try_take():
                    try:
                        if not ready():
                            receive()
                    finally:
                        self.give()
                else:
                    self._wait_for_turn(ready)
        finally:
            with self._changed:
                self._waiting -= 1

    def _wait_for_turn(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if self._turn.locked() and not ready():
                self._changed.wait()


class LinkReceiver(ABC):
    """Whoever receives from the link of a worker; ``session`` is that with the front that is there now."""

    def __init__(self, link: Link, model: Model) -> None:
        self._link = link
        self._model = model
        self.session = self._new_session()
        self._thread = 0
        self._calls = LinkPort(model.context.calls, self)
        self._metrics = MetricPort(model.context.metrics)

    def begin(self) -> None:
        self._thread = threading.get_ident()

    def is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    @abstractmethod
    def wait(self, ready: Callable[[], bool]) -> None:
        """Let messages come in until something is true or the peer is gone; any thread may call it."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the loop with a fault that was found in another thread, which any may be that calls this."""

    @abstractmethod
    def look(self) -> None:
        """Obey what has come, if nobody else does that; any thread may call it."""

    def runs_event_loop(self) -> bool:
        """Whether messages come in on an event loop in the calling thread."""
        return False

    def _new_session(self) -> FrontSession:
        model = self._model
        return FrontSession(self._link, model.path, self.fail, read_only_inputs=model.read_only_inputs)

    def _obey(self, message: wire.Message, fds: list[int]) -> None:
        try:
            self._take(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    @abstractmethod
    def _take(self, message: wire.Message, fds: list[int]) -> None:
        """Obey a message, whose descriptors stay the caller's."""


class LinkReception(LinkReceiver, Generic[_Kept]):
    """Receives on the link of a loop that runs one batch after the other."""

    def __init__(self, link: Link, model: Model, backlog: Backlog[_Kept]) -> None:
        super().__init__(link, model)
        self._backlog = backlog
        #: Whether the callable is running.
        self.running = False
        self.stopping = False
        self.ended = False
        #: What a message did that must not have come.
        self._fault: BaseException | None = None
        self.turn = ReceivingTurn()
        #: Sessions whose memory the batch at hand may still be using.
        self._retired: deque[FrontSession] = deque()

    def next_batch(self) -> _Kept | None:
        """The next batch; all else that comes before it is obeyed. None at the end."""
        while not self.stopping and self._fault is None:
            if self._retired:
                self._close_retired()
            if self._backlog and (batch := self._backlog.take()) is not None:
                return batch
            if self.ended:
                return None
            if self.session.held:
                self.session.flush()
            if self.turn.try_take():
                try:
                    if not self._backlog:  # else who had the turn has just put one there
                        self.receive()
                finally:
                    self.turn.give()
            else:
                self.wait(lambda: bool(self._backlog) or self.stopping)
        return None

    def receive(self) -> None:
        """Take all messages of the next datagram."""
        try:
            while (received := self._link.receive()) is not None:
                self._obey(*received)
                if not self._link.pending:
                    return
        except (WireError, ValueError, KeyError) as error:  # not for the callable that may be waiting here
            self._fault = error
        self.ended = True
        self._calls.close()

    def receive_waiting(self) -> None:
        """Take all messages that have come by now, if nobody else is receiving."""
        while not self.ended and self.turn.try_take():
            try:
                if not self._link.has_message():
                    return
                self.receive()
            finally:
                self.turn.give()

    look = receive_waiting

    def stop(self) -> None:
        """Let ``next_batch`` give no more. Called from any thread."""
        self.stopping = True
        self._link.stop_receiving()

    def fail(self, error: BaseException) -> None:
        self._fault = error
        self._backlog.clear()  # the device may be lost, and none of them is to blame
        self.stop()

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Give up the memory shared with the front, after the end, in a process that goes on."""
        self._calls.close()
        self._metrics.close()
        self._close_retired()
        self._backlog.settle()
        self.session.close()

    def wait(self, ready: Callable[[], bool]) -> None:
        self.turn.receive_until(lambda: self.ended or ready(), self.receive)

    def _take(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.Run():
                self._backlog.keep(self.session, message)
            case wire.Answer():
                self._calls.take(message)
            case wire.Cancel(batch_id, position):
                self._backlog.cancel(batch_id, position)  # a plain function that runs cannot be interrupted
            case wire.Attach(epoch):
                self._attach(epoch)
            case _:
                self.session.take_memory(message, fds)

    def _attach(self, epoch: int) -> None:
        """Let another front take over. Who asks on the old session from now on is refused, and who has,
        failed: no question is left without an answer.
        """
        self.session.retire()
        self._retired.append(self.session)
        if self.is_own_thread() and not self.running:
            self._close_retired()
        self._backlog.clear()  # it was the front before that wanted them
        self._link.send(wire.Attached(epoch))
        self.session = self._new_session()
        self._calls.attached()
        self._metrics.attached(self.session)

    def _close_retired(self) -> None:
        self._backlog.settle()
        while self._retired:
            self._retired.popleft().close()
