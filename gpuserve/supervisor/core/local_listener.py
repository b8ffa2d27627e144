"""A listener on an abstract AF_UNIX name, and who may come in by it: processes of the same user, and root.
What is said on a connection is for those to know who take it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Final

from gpuserve.control.attach import may_attach, peer_credentials
from gpuserve.control.reactor import Reactor

logger = logging.getLogger(__name__)

_BACKLOG: Final = 128
#: Out of descriptors, it is tried again to take a connection after this time.
_RETRY_S: Final = 1.0


class LocalListener:
    """One listener, from ``open()`` to ``close()``. ``on_connected`` is given each connection, which is its
    own from then on. ``purpose`` is what those who come want, for the log: "attach".
    """

    def __init__(
        self, name: bytes, reactor: Reactor, on_connected: Callable[[socket.socket], None], purpose: str
    ) -> None:
        self._name = name
        self._reactor = reactor
        self._on_connected = on_connected
        self._purpose = purpose
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._takes = False
        self._is_watched = False

    def open(self) -> None:
        """Take connections from now on.

        Raises:
            OSError: another process has the name; nothing is left open.
        """
        try:
            self._sock.bind(self._name)
            self._sock.listen(_BACKLOG)
            self._sock.setblocking(False)
        except OSError:
            self._sock.close()
            raise
        self.resume()

    def pause(self) -> None:
        """Let new connections wait in the backlog, until ``resume()``."""
        self._takes = False
        self._unwatch()

    def resume(self) -> None:
        self._takes = True
        self._watch()

    def close(self) -> None:
        self.pause()
        self._sock.close()

    def _watch(self) -> None:
        if self._takes and not self._is_watched:
            self._is_watched = True
            self._reactor.watch(self._sock.fileno(), self._accept)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._reactor.unwatch(self._sock.fileno())

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: that passes
            logger.error("no process can %s now: %s", self._purpose, error.strerror or error)
            self._unwatch()
            self._reactor.call_later(_RETRY_S, self._watch)
            return
        peer = peer_credentials(sock)
        if may_attach(os.geteuid(), peer.uid):
            self._on_connected(sock)
        else:
            logger.warning("process %d may not %s: it belongs to user %d", peer.pid, self._purpose, peer.uid)
            sock.close()
