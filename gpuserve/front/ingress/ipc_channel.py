"""The IPC channel between the front and an ingress process, and the outage between two fronts. Messages are
trusted: both ends have one version and run no user code. An ingress process outlives its front: it uses one
``IpcChannel`` for all fronts, each of which has a socket pair of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from gpuserve.core.errors import RequestError, Unavailable
from gpuserve.front.ingress.channel_messages import CHANNEL_MESSAGES
from gpuserve.front.net.exchange import Piece
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.datagram import joined

#: The most datagrams that are read before other work of the event loop runs.
_BURST: Final = 16
#: The retry period of a large message for which no descriptor is free.
_RETRY_S: Final = 0.05
#: The longest time for which messages without hurry wait for others.
_SOON_S: Final = 0.001


class IpcChannel:
    """One end of the channel, open from ``open`` to ``close``.

    ``on_message`` gets each message with its descriptors, which are closed after the call. ``on_lost`` is
    called once for each socket, when the other end is gone. Without ``sock`` the channel is closed until
    ``reopen``. Messages that are sent meanwhile are dropped.
    """

    def __init__(
        self,
        sock: socket.socket | None,
        on_message: Callable[[Any, list[int]], None],
        on_lost: Callable[[], object],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        #: Messages for the next datagram, which is sent at the end of this turn of the event loop.
        self._posted: list[bytes] = []
        self._posted_nbytes = 0
        #: Callbacks that post further messages before that, and whether a flush is due.
        self._at_end: list[Callable[[], None]] = []
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        #: Messages that were read early and are not dispatched yet.
        self._deferred: deque[Any] = deque()
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

    def drain_and_close(self) -> None:
        """Process all messages of the other process, which has ended, and close."""
        while (received := self._receive()) is not None:
            self._dispatch(*received)
        self.close()

    def reopen(self, sock: socket.socket) -> None:
        """Use another socket after ``close``. Messages posted since are dropped."""
        self._posted, self._posted_nbytes = [], 0
        self._sock, self._closed = sock, False
        self.open()

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def waiting_nbytes(self) -> int:
        """Return the size of the messages that wait here until the other end reads."""
        return self._posted_nbytes + sum([len(data) for data, _ in self._outbox])

    def post(self, message: Any) -> None:
        """Send a message with all others of this turn of the event loop, at its end."""
        data = CHANNEL_MESSAGES.encode(message)
        nbytes = self._posted_nbytes + len(data)
        if nbytes > datagram.MAX_TOGETHER_NBYTES and self._posted:
            self._send_posted()
            nbytes = len(data)
        self._posted.append(data)
        self._posted_nbytes = nbytes
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, before the messages of this turn of the event loop are sent."""
        self._at_end.append(callback)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)

    def call_at_next(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, before other messages are sent, but soon in any case."""
        self._at_end.append(callback)
        if not self._is_due and self._timer is None:
            self._timer = self._loop.call_later(_SOON_S, self._on_time)

    def send(self, message: Any, fds: Sequence[int]) -> None:
        """Send a message after the posted ones, with descriptors, which the caller keeps."""
        self.flush()
        self._transmit(CHANNEL_MESSAGES.encode(message), fds)

    def flush(self) -> None:
        if self._at_end:
            callbacks, self._at_end = self._at_end, []
            for callback in callbacks:
                callback()
        self._is_due = False
        self._send_posted()

    def _on_time(self) -> None:
        self._timer = None
        self.flush()

    def process_urgent(self, urgent: Collection[type]) -> None:
        """Process all received messages of the types ``urgent`` now. The others wait for their turn."""
        while (received := self._receive()) is not None:
            found, fds = received
            if fds:  # depends on no urgent message, and its descriptors cannot be kept
                self._dispatch(found, fds)
                continue
            for message in found:
                if type(message) in urgent:
                    self._on_message(message, fds)
                else:
                    if not self._deferred:
                        self._loop.call_soon(self._dispatch_deferred)
                    self._deferred.append(message)

    def _send_posted(self) -> None:
        if self._posted:
            posted, self._posted, self._posted_nbytes = self._posted, [], 0
            self._transmit(joined(posted), ())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._deferred.clear()
        self.flush()  # drops the messages, which must not be sent on the next socket
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        for _, fds in self._outbox:
            datagram.close_all(fds)
        self._outbox.clear()
        self._sock.close()

    def _transmit(self, data: bytes, fds: Sequence[int]) -> None:
        if self._closed:
            return
        if not self._outbox:
            try:
                datagram.send(self._sock, data, fds)
                return
            except OSError as error:
                if not self._retry_later(error):
                    return
        self._outbox.append((data, [os.dup(fd) for fd in fds]))

    def _on_writable(self) -> None:
        while self._outbox and not self._closed:
            data, fds = self._outbox[0]
            try:
                datagram.send(self._sock, data, fds)
            except OSError as error:
                self._retry_later(error)
                return
            self._outbox.popleft()
            datagram.close_all(fds)
        if not self._closed:
            self._loop.remove_writer(self._sock.fileno())

    def _retry_later(self, error: OSError) -> bool:
        """Arrange a later retry; return False if the other end is gone, which reading reports."""
        if isinstance(error, BlockingIOError):
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
            return True
        if datagram.is_starved(error):
            self._loop.remove_writer(self._sock.fileno())
            self._loop.call_later(_RETRY_S, self._on_writable)
            return True
        return False

    def _read(self) -> None:
        """Process all available messages now, so that their requests join the same batches."""
        self._dispatch_deferred()
        for _ in range(_BURST):
            received = self._receive()
            if received is None:
                return
            self._dispatch(*received)

    def _dispatch_deferred(self) -> None:
        while self._deferred and not self._closed:
            self._on_message(self._deferred.popleft(), [])

    def _dispatch(self, found: list[Any], fds: list[int]) -> None:
        try:
            for message in found:
                self._on_message(message, fds)
        finally:
            datagram.close_all(fds)

    def _receive(self) -> tuple[list[Any], list[int]] | None:
        """Return the messages of one datagram and its descriptors; None if there is none."""
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
        return CHANNEL_MESSAGES.decode_all(data), fds


#: Equal to the time for which requests wait for a model whose instances are all down.
OUTAGE_TIMEOUT_S: Final = 5.0


class FrontOutage:
    """Detects whether a front is connected, and holds requests until one is, but for the first."""

    def __init__(self, timeout_s: float = OUTAGE_TIMEOUT_S) -> None:
        self.is_active = False
        self._timeout_s = timeout_s
        self._held: list[tuple[Callable[[], None], Callable[[RequestError], None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_timed_out = False
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Hold requests from now on, because the front has ended."""
        self.is_active = True
        self._timer = self._loop.call_later(self._timeout_s, self._on_timeout)

    def hold(self, resume: Callable[[], None], refuse: Callable[[RequestError], None]) -> None:
        """Call ``resume`` when a front is connected, or ``refuse`` with an error, after this returns."""
        if self._is_timed_out:
            self._loop.call_soon(refuse, _no_front_in_time())
        else:
            self._held.append((resume, refuse))

    def end(self) -> None:
        """Resume the held requests in the order of their arrival, because a front is connected."""
        if self._timer is not None:
            self._timer.cancel()
        self.is_active = self._is_timed_out = False
        held, self._held = self._held, []
        for resume, _ in held:
            resume()

    def _on_timeout(self) -> None:
        self._is_timed_out = True
        held, self._held = self._held, []
        for _, refuse in held:
            refuse(_no_front_in_time())


def front_died() -> RequestError:
    """Return the error of a request that the dead front had."""
    return Unavailable("the front process of the server died while it had this request, which may have run")


def _no_front_in_time() -> RequestError:
    return Unavailable("the front process of the server is down, and no other has come in time")


#: The largest part of a body in one message, which fits into a datagram.
PIECE_NBYTES: Final = 64 << 10
#: The most bytes of one response on the way to an ingress process.
WINDOW_NBYTES: Final = 256 << 10
#: The sent bytes after which an ingress process grants credit.
CREDIT_NBYTES: Final = 64 << 10


def split_into_pieces(body: Sequence[Piece], nbytes: int) -> list[Piece]:
    """Split a body of ``nbytes`` bytes into parts for messages, at least one. Large parts are not copied."""
    if nbytes <= PIECE_NBYTES:
        return [b"".join(body)]
    starts = ((one, start) for one in body for start in range(0, len(one), PIECE_NBYTES))
    return [memoryview(one)[start : start + PIECE_NBYTES] for one, start in starts]
