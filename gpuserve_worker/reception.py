"""What a worker's loop hears on its link, whichever of its threads receives: batches are kept for the loop,
all else is obeyed at once. No callable is called here, and no batch is run.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from gpuserve_worker import wire
from gpuserve_worker.call_port import LinkPort
from gpuserve_worker.calls import Calls
from gpuserve_worker.link import Link
from gpuserve_worker.session import Session
from gpuserve_worker.turns import Turns
from gpuserve_worker.wire import WireError

_Kept = TypeVar("_Kept")
_Kept_co = TypeVar("_Kept_co", covariant=True)


class Backlog(Protocol[_Kept_co]):
    """The batches that have come and are not run yet."""

    def __len__(self) -> int:
        """How many there are."""

    def keep(self, session: Session, run: wire.Run) -> None:
        """One has come on a session."""

    def take(self) -> _Kept_co | None:
        """The oldest, which is to be run now; None where there is none."""

    def clear(self) -> None:
        """The front that wanted them is gone."""


class Reception(Generic[_Kept]):
    """The link of one loop, and the front on it. ``before_close`` is called before the memory of a front that
    is gone is given up.
    """

    def __init__(
        self,
        link: Link,
        calls: Calls,
        backlog: Backlog[_Kept],
        new_session: Callable[[], Session],
        before_close: Callable[[], None],
    ) -> None:
        self._link = link
        self._backlog = backlog
        self._new_session = new_session
        self._before_close = before_close
        self.session = new_session()
        #: Whether the callable is running.
        self.running = False
        self.stopping = False
        self.ended = False
        #: What a message did that must not have come.
        self._fault: BaseException | None = None
        self._thread = 0
        self.turns = Turns()
        #: Sessions whose memory the batch at hand may still be using.
        self._retired: deque[Session] = deque()
        self._calls = LinkPort(calls, lambda: self.session, self._wait, self._is_own_thread)

    def begin(self) -> None:
        """The calling thread is the loop's own from now on."""
        self._thread = threading.get_ident()

    def next_batch(self) -> _Kept | None:
        """The next batch; all else that comes before it is obeyed. None at the end."""
        while not self.stopping and self._fault is None:
            if self._retired:
                self._close_retired()
            if self._backlog and (batch := self._backlog.take()) is not None:
                return batch
            if self.ended:
                return None
            if self.turns.try_take():
                try:
                    if not self._backlog:  # else who had the turn has just put one there
                        self.receive()
                finally:
                    self.turns.give()
            else:
                self._wait(lambda: bool(self._backlog) or self.stopping)
        return None

    def receive(self) -> None:
        """Take one message, in whichever thread has the turn."""
        try:
            received = self._link.receive()
            if received is not None:
                self._obey(*received)
                return
        except (WireError, ValueError, KeyError) as error:  # not for the callable that may be waiting here
            self._fault = error
        self.ended = True
        self._calls.close()

    def stop(self) -> None:
        """``next_batch`` gives no more. Called from any thread."""
        self.stopping = True
        self._link.stop_receiving()

    def fail(self, error: BaseException) -> None:
        """Stop, because of a fault in another thread of the loop."""
        self._fault = error
        self.stop()

    def raise_fault(self) -> None:
        """Raise what ended the reception, where that was a fault."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Give up the memory shared with the front, after the end, in a process that goes on."""
        self._calls.close()
        self._close_retired()
        self._before_close()
        self.session.close()

    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Receive, or let another thread do so, until something is true or the peer is gone."""
        self.turns.receive_until(lambda: self.ended or ready(), self.receive)

    def _obey(self, message: wire.Message, fds: list[int]) -> None:
        try:
            self._take(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.Run():
                self._backlog.keep(self.session, message)
            case wire.Answer():
                self._calls.take(message)
            case wire.Cancel():
                pass  # the batch ran before this was read: a plain function cannot be interrupted
            case wire.Attach(epoch):
                self._attach(epoch)
            case _:
                self.session.take_memory(message, fds)

    def _attach(self, epoch: int) -> None:
        """Another front takes over. Who asks on the old session from now on is refused, and who has, failed:
        no question is left without an answer.
        """
        self.session.retire()
        self._retired.append(self.session)
        if self._is_own_thread() and not self.running:
            self._close_retired()
        self._backlog.clear()  # it was the front before that wanted them
        self._link.send(wire.Attached(epoch))
        self.session = self._new_session()
        self._calls.attached()

    def _close_retired(self) -> None:
        self._before_close()
        while self._retired:
            self._retired.popleft().close()
