"""The sockets of an attachment: connecting, and who is at the other end. What is said there is
for those to know who hold the ends.

The kernel says who the peer is (SO_PEERCRED). That it has ended is told by its end of the socket, and by its
pidfd as well: a child that it forked may hold the socket open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from gpuserve.supervisor.attach_address import attach_name
from gpuserve.supervisor.attach_messages import ATTACH
from gpuserve.supervisor.channel import Channel
from gpuserve.supervisor.reactor import Reactor
from gpuserve_worker import datagram
from gpuserve_worker.wire import WireError

logger = logging.getLogger(__name__)

_CREDENTIALS: Final = struct.Struct("iII")


class PeerCredentials(NamedTuple):
    """The process at the other end when it connected or listened. The pid is 0 where it is not visible."""

    pid: int
    uid: int


def connect(port: int) -> socket.socket:
    """A connection to this user's server that has the port.

    Raises:
        OSError: nobody listens, or not now.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)  # a server that does not accept has a full backlog
        sock.connect(attach_name(os.geteuid(), port))
    except OSError:
        sock.close()
        raise
    return sock


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Who is at the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return PeerCredentials(pid, uid)


class AttachEnd:
    """One end of an attachment, from ``open()`` to ``close()`` or to the loss of the other end.

    ``on_message`` is given each message with its descriptors, and empties the list where it keeps them; it
    raises ``WireError`` for what the peer must not say. ``on_lost`` is told once why the peer is gone,
    unless ``close()`` came first.
    """

    def __init__(
        self,
        sock: socket.socket,
        reactor: Reactor,
        on_message: Callable[[Any, list[int]], None],
        on_lost: Callable[[str], None],
        *,
        send_timeout_s: float,
    ) -> None:
        self.peer = peer_credentials(sock)
        self._channel = Channel(sock, ATTACH, send_timeout_s)
        self._reactor = reactor
        self._on_message = on_message
        self._on_lost = on_lost
        self._death_fd: int | None = None
        self._closed = False

    def open(self) -> None:
        """Hear the peer from now on."""
        self._reactor.watch(self._channel.fileno(), self._on_readable)
        with contextlib.suppress(OSError):  # of another pid namespace: then its socket has to tell
            self._death_fd = os.pidfd_open(self.peer.pid)
            self._reactor.watch(self._death_fd, self._on_died)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Tell the peer; it may be gone already. The descriptors stay the caller's."""
        if self._closed:
            return
        try:
            self._channel.send(message, fds)
        except TimeoutError:
            # Not at once: who sends may be in the middle of something.
            self._reactor.call_later(0.0, lambda: self._lose("it does not read what it is told"))

    def close(self) -> None:
        """Let the peer go."""
        if self._closed:
            return
        self._closed = True
        self._reactor.unwatch(self._channel.fileno())
        self._channel.close()
        if self._death_fd is not None:
            self._reactor.unwatch(self._death_fd)
            os.close(self._death_fd)

    def _on_readable(self) -> None:
        try:
            received = self._channel.receive_with_fds()
        except BlockingIOError:
            return
        except (WireError, OSError) as error:
            self._broke_off(error)
            return
        if received is None:
            self._lose("it has ended")
            return
        message, fds = received
        try:
            self._on_message(message, fds)
        except WireError as error:
            self._broke_off(error)
        finally:
            datagram.close_all(fds)

    def _on_died(self) -> None:
        """What it said before it ended is still there to be heard."""
        while not self._closed and self._channel.pending():
            self._on_readable()
        self._lose("it has ended")

    def _broke_off(self, error: Exception) -> None:
        logger.error("process %d broke the protocol of attachments, and is let go: %s", self.peer.pid, error)
        self._lose("it broke the protocol")

    def _lose(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_lost(reason)
