"""A listener on abstract AF_UNIX names, and who may come in by them: processes of the same user, and root."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from gpuserve.control.attach import may_attach, peer_credentials
from gpuserve.control.reactor import Reactor

logger = logging.getLogger(__name__)

_BACKLOG: Final = 128
#: Out of descriptors, it is tried again to take a connection after this time.
_RETRY_S: Final = 1.0
#: Who may not come in is logged this often: it is any user of the machine.
_LOG_INTERVAL_S: Final = 1.0


class LocalListener:
    """Listens on each name that it is given, until ``close()``. ``on_connected`` gets each connection, which
    is its own from then on. ``purpose`` is what those who come want, for the log: "attach".
    """

    def __init__(self, reactor: Reactor, on_connected: Callable[[socket.socket], None], purpose: str) -> None:
        self._reactor = reactor
        self._on_connected = on_connected
        self._purpose = purpose
        self._socks: list[socket.socket] = []
        self._takes = True
        self._quiet_until = 0.0

    def open(self, name: bytes, otherwise: str) -> None:
        """Take connections by one more name; where another process has it, ``otherwise`` is logged."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(name)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            logger.warning("%s: %s", otherwise, error.strerror or error)
            return
        sock.setblocking(False)
        self._socks.append(sock)
        self._watch()

    def pause(self) -> None:
        """Let new connections wait in the backlog, until ``resume()``."""
        self._takes = False
        self._unwatch()

    def resume(self) -> None:
        self._takes = True
        self._watch()

    def close(self) -> None:
        self.pause()
        for sock in self._socks:
            sock.close()
        self._socks.clear()

    def _watch(self) -> None:
        if self._takes:
            self._unwatch()
            for sock in self._socks:
                self._reactor.watch(sock.fileno(), partial(self._accept, sock))

    def _unwatch(self) -> None:
        for sock in self._socks:
            self._reactor.unwatch(sock.fileno())

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
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
            return
        sock.close()
        if (now := time.monotonic()) >= self._quiet_until:
            self._quiet_until = now + _LOG_INTERVAL_S
            logger.warning("process %d may not %s: it belongs to user %d", peer.pid, self._purpose, peer.uid)
