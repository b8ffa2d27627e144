"""A worker's blocking socket end for whole messages, with the transport of ``datagram.py``."""

from __future__ import annotations

import _socket
import os
import select
from collections import deque
from collections.abc import Sequence
from typing import Final

from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import WORKER, Init, Lend, Message, Region, Segment, Weights, WireError

#: Messages that carry exactly one descriptor, as does ``Init`` with ``ranges``; ``Weights`` on a device carry
#: two. All others carry none.
_WITH_MEMORY: Final = frozenset({Segment, Region, Lend, Weights})


class Link:
    """A blocking socket end: one thread receives, any thread sends, as a datagram is sent whole."""

    def __init__(self, sock: _socket.socket) -> None:
        self._socket = sock
        self._buffer = datagram.receive_buffer()
        #: Received messages of the last datagram that ``receive`` has not returned yet.
        self.pending: deque[Message] = deque()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    @classmethod
    def from_fd(cls, fd: int) -> Link:
        """Return the end of an inherited descriptor, which child processes shall not inherit."""
        os.set_inheritable(fd, False)
        return cls(_socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def has_message(self, timeout_s: float = 0.0) -> bool:
        return bool(self.pending or self._readable.poll(timeout_s * 1000))

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors, which the caller closes, or None if the peer is gone.
        Raise ``OSError``, or ``WireError`` if the data are no message or the number of descriptors is wrong.
        """
        if self.pending:
            return self.pending.popleft(), []
        try:
            data, fds = datagram.receive(self._socket, self._buffer)
        except ConnectionResetError:
            return None
        try:
            if not data:
                datagram.close_all(fds)
                return None
            message, *more = WORKER.decode_all(data)
            is_sealed = isinstance(message, Init) and "ranges" in message.source
            expected = 1 if is_sealed or type(message) in _WITH_MEMORY else 0
            expected += isinstance(message, Weights) and bool(message.device)
            if len(fds) != expected:
                raise WireError(f"{type(message).__name__} came with {len(fds)} descriptors, not {expected}")
            if more:
                if any(type(one) in _WITH_MEMORY for one in more):
                    raise WireError("a message whose descriptor cannot be told from those of others")
                self.pending.extend(more)
        except BaseException:
            datagram.close_all(fds)
            raise
        return message, fds

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; block while the peer's buffer is full. Raise ``OSError`` if the peer is gone."""
        datagram.send(self._socket, WORKER.encode(message), fds)

    def send_encoded(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send an encoded message, as ``send`` does."""
        datagram.send(self._socket, data, fds)

    def try_send(self, message: Message) -> bool:
        """Send a message if that does not block and the peer exists; return whether it was sent."""
        try:
            datagram.send(self._socket, WORKER.encode(message), (), _socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def stop_receiving(self) -> None:
        """Make ``receive`` return None in whichever thread blocks in it. Sending still works."""
        self._socket.shutdown(_socket.SHUT_RD)

    def close(self) -> None:
        self._socket.close()
