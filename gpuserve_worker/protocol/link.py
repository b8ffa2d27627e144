"""The worker's blocking end of a socket: whole messages in, whole messages out. How messages become a
datagram is in ``datagram.py``, which the asynchronous ends use as well. What the messages mean is not known
here.
"""

from __future__ import annotations

import _socket
import os
import select
from collections import deque
from collections.abc import Sequence
from typing import Final

from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import WORKER, Lend, Message, Region, Segment, WireError

#: A descriptor rides beside these, and beside no other.
_WITH_MEMORY: Final = frozenset({Segment, Region, Lend})


class Link:
    """A blocking end. One thread receives; any thread may send, since a datagram is sent whole."""

    def __init__(self, sock: _socket.socket) -> None:
        self._socket = sock
        self._buffer = datagram.receive_buffer()
        #: What came in the last datagram and has not been taken.
        self.pending: deque[Message] = deque()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    @classmethod
    def from_fd(cls, fd: int) -> Link:
        """The end behind an inherited descriptor, which from now on no program started here inherits."""
        os.set_inheritable(fd, False)
        return cls(_socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def has_message(self) -> bool:
        return bool(self.pending or self._readable.poll(0))

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, which are the caller's; None when the peer is gone. Raises
        ``OSError``, or ``WireError`` where it is no message, or has not the descriptors that belong to it.
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
            expected = 1 if type(message) in _WITH_MEMORY else 0
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
        """Send a message; waits while the peer's buffer is full. ``OSError``: the peer is gone."""
        datagram.send(self._socket, WORKER.encode(message), fds)

    def send_encoded(self, data: bytes) -> None:
        """Send what is encoded already, and has no descriptors; as ``send``."""
        datagram.send(self._socket, data)

    def try_send(self, message: Message) -> bool:
        """Send a message if that needs no waiting and the peer is there. Says whether it was sent."""
        try:
            datagram.send(self._socket, WORKER.encode(message), (), _socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def stop_receiving(self) -> None:
        """Let ``receive``, in whichever thread it waits, see the end. Sending goes on."""
        self._socket.shutdown(_socket.SHUT_RD)

    def close(self) -> None:
        self._socket.close()
