"""The supervisor's end of a SEQPACKET pair to a child: messages out, messages in."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from typing import Any, Final

from gpuserve_worker import datagram
from gpuserve_worker.wire import Vocabulary

#: A child that is alive and reads nothing for this long while its socket is full does not work any more.
SEND_TIMEOUT_S: Final = 10.0


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; nothing can connect to them and they have no name."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. Sending to a dead peer is no error: its death is told by its pidfd."""

    def __init__(self, sock: socket.socket, vocabulary: Vocabulary) -> None:
        self._sock = sock
        self._vocabulary = vocabulary
        self._buffer = memoryview(bytearray(datagram.MAX_DATAGRAM_NBYTES))
        sock.settimeout(SEND_TIMEOUT_S)

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay ours.

        Raises:
            TimeoutError: the peer lives but has not read for ``SEND_TIMEOUT_S``.
        """
        try:
            datagram.send(self._sock, self._vocabulary.encode(message), fds)
        except ConnectionError:
            pass

    def pending(self) -> bool:
        """Whether ``receive`` would return at once."""
        poll = select.poll()  # select() stops at descriptor 1023
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def receive(self) -> Any | None:
        """The next message, or None at the end. Descriptors are not expected here and are closed.

        Raises:
            WireError, OSError: what came is no message of this channel.
        """
        try:
            data, fds = datagram.receive(self._sock, self._buffer)
        except ConnectionError:
            return None
        for fd in fds:
            os.close(fd)
        return self._vocabulary.decode(data) if data else None

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
