"""A listener on abstract AF_UNIX names, and who may come in by them: processes of the same user, and root."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from gpuserve.control.attach import may_attach, peer_credentials
from gpuserve.control.reactor import Reactor
from gpuserve.errors import StartupError
from gpuserve.settings.rare_log import RareLog

logger = logging.getLogger(__name__)

_BACKLOG: Final = 128
#: Out of descriptors, it is tried again to take a connection after this time.
_RETRY_S: Final = 1.0
#: After so many processes of other users no connection is taken for a moment, whoever's: they may come as
#: fast as they like.
_STRANGERS: Final = 128
_REST_S: Final = 0.05


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
        self._refusals = RareLog(logger)
        self._n_strangers = 0

    def open(self, name: bytes, otherwise: str, *, required: bool) -> None:
        """Take connections by one more name; where another process has it, ``otherwise`` is logged. Raises
        StartupError: another process has it, and it is ``required``.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(name)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            text = f"{otherwise}: {error.strerror or error}{_holder(name)}"
            if required:
                raise StartupError(f"{text} (the setting require_control is on)") from None
            logger.error("%s", text)
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
        else:
            sock.close()
            text = "process %d may not %s: it belongs to user %d"
            self._refusals.say(text, peer.pid, self._purpose, peer.uid)
            self._n_strangers += 1
            if not self._n_strangers % _STRANGERS:
                self._unwatch()
                self._reactor.call_later(_REST_S, self._watch)


def _holder(name: bytes) -> str:
    """Who listens on a name, for a sentence; "" where nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except OSError:
            return ""
        peer = peer_credentials(sock)
    return f" by process {peer.pid} of user {peer.uid}"
