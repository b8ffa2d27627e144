"""The supervisor's end of a SEQPACKET pair to a child: messages out, messages in."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from gpuserve_worker import datagram
from gpuserve_worker.wire import Vocabulary


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; nothing can connect to them and they have no name."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. Sending to a dead peer is no error: its death is told by its pidfd."""

    def __init__(self, sock: socket.socket, vocabulary: Vocabulary) -> None:
        self._sock = sock
        self._vocabulary = vocabulary
        self._buffer = memoryview(bytearray(datagram.MAX_DATAGRAM_NBYTES))

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay ours."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            datagram.send(self._sock, self._vocabulary.encode(message), fds)

    def receive(self) -> Any | None:
        """The next message, or None at the end. Descriptors are not expected here and are closed."""
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
