"""The supervisor's end of a SEQPACKET pair to a child: messages out, messages in."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any, Final

from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import Vocabulary

#: A child that is alive and reads nothing for this long while its socket is full does not work any more.
SEND_TIMEOUT_S: Final = 10.0


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Make two connected ends; they have no name, and nothing else can connect to them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end of a socket pair. Sending to a dead peer is no error: its death is told by its pidfd."""

    def __init__(
        self, sock: socket.socket, vocabulary: Vocabulary, send_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        self._sock = sock
        self._vocabulary = vocabulary
        self._buffer = datagram.receive_buffer()
        sock.settimeout(send_timeout_s)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay ours. ``TimeoutError`` where a live peer does not read."""
        try:
            datagram.send(self._sock, self._vocabulary.encode(message), fds)
        except BlockingIOError:  # a timeout of 0
            raise TimeoutError("the peer does not read") from None
        except ConnectionError:
            pass

    def offer(self, message: Any) -> bool:
        """Send a message if there is room for it at this moment, and say whether there was."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        if not poll.poll(0):
            return False
        self.send(message)
        return True

    def pending(self) -> bool:
        poll = select.poll()  # select() stops at descriptor 1023
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def receive(self) -> Any | None:
        """Return the next message, None at the end; ``WireError`` or ``OSError`` for nonsense."""
        received = self.receive_with_fds()
        if received is None:
            return None
        message, fds = received
        datagram.close_all(fds)
        return message

    def receive_with_fds(self) -> tuple[Any, list[int]] | None:
        """As ``receive``, with the message's descriptors, which are the caller's."""
        try:
            data, fds = datagram.receive(self._sock, self._buffer)
        except ConnectionError:
            return None
        try:
            if data:
                return self._vocabulary.decode(data), fds
        except BaseException:
            datagram.close_all(fds)
            raise
        datagram.close_all(fds)
        return None

    def close(self) -> None:
        self._sock.close()
