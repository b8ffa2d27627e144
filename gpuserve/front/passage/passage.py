"""One end of the socket pair between the front and a door: messages out and in on the event loop. Both ends
are of one version and run none of a user's code. What the messages mean is not known here. A door outlives
its front: it uses one ``Passage`` for all fronts, each of which has a socket pair of its own (``reopen``).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from gpuserve.front.passage.messages import PASSAGE
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.vocabulary import joined

#: As many datagrams are read in one go before other work of the loop gets its turn.
_BURST: Final = 16
#: Without a descriptor for a large message it is tried again so soon.
_RETRY_S: Final = 0.05
#: So long something waits for company that is of no hurry.
_SOON_S: Final = 0.001


class Passage:
    """An end, open from ``open`` to ``close``. ``on_message`` takes each message with its descriptors, which
    are closed after it; ``on_lost`` is called once for each socket, when the other end is gone. Without
    ``sock`` it is closed until ``reopen``; what is sent while it is closed is dropped.
    """

    def __init__(
        self,
        sock: socket.socket | None,
        on_message: Callable[[Any, list[int]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        #: Messages for the next datagram, which leaves at the end of this turn of the loop.
        self._posted: list[bytes] = []
        self._posted_nbytes = 0
        #: Who has something to post then, and whether that is due.
        self._at_end: list[Callable[[], None]] = []
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        #: What was read ahead of its turn.
        self._put_off: deque[Any] = deque()
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._buffer = datagram.receive_buffer()
        self._loop = asyncio.get_running_loop()
        self._closed = sock is None
        self._sock: socket.socket
        if sock is not None:
            self._sock = sock

    def open(self) -> None:
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._read)

    def finish(self) -> None:
        """Take what the process at the other end, which has ended, has sent, and close."""
        while (received := self._receive()) is not None:
            self._take(*received)
        self.close()

    def reopen(self, sock: socket.socket) -> None:
        """Use another socket, when closed. What was posted since is for nobody."""
        self._posted, self._posted_nbytes = [], 0
        self._sock, self._closed = sock, False
        self.open()

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def waiting_nbytes(self) -> int:
        """How much of what was sent waits here until the other end reads."""
        return self._posted_nbytes + sum([len(data) for data, _ in self._outbox])

    def post(self, message: Any) -> None:
        """Send with all others of this turn of the loop, at its end."""
        data = PASSAGE.encode(message)
        nbytes = self._posted_nbytes + len(data)
        if nbytes > datagram.MAX_TOGETHER_NBYTES and self._posted:
            self._leave_posted()
            nbytes = len(data)
        self._posted.append(data)
        self._posted_nbytes = nbytes
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Have somebody post what there is to say by the end of this turn of the loop, once."""
        self._at_end.append(callback)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)

    def call_at_next(self, callback: Callable[[], None]) -> None:
        """Have somebody post what there is to say when something else is sent, but soon in any case, once."""
        self._at_end.append(callback)
        if not self._is_due and self._timer is None:
            self._timer = self._loop.call_later(_SOON_S, self._on_time)

    def send(self, message: Any, fds: Sequence[int]) -> None:
        """Send after what was posted, with descriptors, which stay the caller's."""
        self.flush()
        self._leave(PASSAGE.encode(message), fds)

    def flush(self) -> None:
        if self._at_end:
            callbacks, self._at_end = self._at_end, []
            for callback in callbacks:
                callback()
        self._is_due = False
        self._leave_posted()

    def _on_time(self) -> None:
        self._timer = None
        self.flush()

    def look_ahead(self, urgent: Collection[type]) -> None:
        """Take those messages at once, of all that have come by now; the others wait for their turn."""
        while (received := self._receive()) is not None:
            found, fds = received
            if fds:  # it refers to nothing that is urgent, and its descriptors are here only now
                self._take(found, fds)
                continue
            for message in found:
                if type(message) in urgent:
                    self._on_message(message, fds)
                else:
                    if not self._put_off:
                        self._loop.call_soon(self._take_put_off)
                    self._put_off.append(message)

    def _leave_posted(self) -> None:
        if self._posted:
            posted, self._posted, self._posted_nbytes = self._posted, [], 0
            self._leave(joined(posted), ())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._put_off.clear()
        self.flush()  # which drops it: nothing of it may leave by the next socket
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        for _, fds in self._outbox:
            datagram.close_all(fds)
        self._outbox.clear()
        self._sock.close()

    def _leave(self, data: bytes, fds: Sequence[int]) -> None:
        if self._closed:
            return
        if not self._outbox:
            try:
                datagram.send(self._sock, data, fds)
                return
            except OSError as error:
                if not self._may_pass(error):
                    return
        self._outbox.append((data, [os.dup(fd) for fd in fds]))

    def _on_writable(self) -> None:
        while self._outbox and not self._closed:
            data, fds = self._outbox[0]
            try:
                datagram.send(self._sock, data, fds)
            except OSError as error:
                self._may_pass(error)
                return
            self._outbox.popleft()
            datagram.close_all(fds)
        if not self._closed:
            self._loop.remove_writer(self._sock.fileno())

    def _may_pass(self, error: OSError) -> bool:
        """Whether it can be sent later; if not, the other end is gone, which reading tells."""
        if isinstance(error, BlockingIOError):
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
            return True
        if datagram.is_starved(error):
            self._loop.remove_writer(self._sock.fileno())
            self._loop.call_later(_RETRY_S, self._on_writable)
            return True
        return False

    def _read(self) -> None:
        """Take what is there, so that it goes into the same batches."""
        self._take_put_off()
        for _ in range(_BURST):
            received = self._receive()
            if received is None:
                return
            self._take(*received)

    def _take_put_off(self) -> None:
        while self._put_off and not self._closed:
            self._on_message(self._put_off.popleft(), [])

    def _take(self, found: list[Any], fds: list[int]) -> None:
        try:
            for message in found:
                self._on_message(message, fds)
        finally:
            datagram.close_all(fds)

    def _receive(self) -> tuple[list[Any], list[int]] | None:
        """The messages of one datagram with its descriptors; None: there is none now, or never again."""
        if self._closed:
            return None
        try:
            data, fds = datagram.receive(self._sock, self._buffer)
        except BlockingIOError:
            return None
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self.close()
            self._on_lost()
            return None
        return PASSAGE.decode_all(data), fds
