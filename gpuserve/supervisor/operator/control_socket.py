"""The socket that a running server is operated by, and the clients that ask. The kernel says who a client is
(SO_PEERCRED); one that sends anything but one question, or nothing, is let go, and no other notices.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from gpuserve.control.operator import (
    ALIVE_PERIOD_S,
    OPERATE,
    PROTOCOL,
    Alive,
    Answered,
    AnswerOutcome,
    Ask,
    Tell,
    Told,
    VerbOutcome,
)
from gpuserve.control.operator_client import ControlName
from gpuserve.control.reactor import Reactor
from gpuserve.errors import Code
from gpuserve.supervisor.core.listeners import Listeners
from gpuserve.supervisor.core.local_listener import LocalListener
from gpuserve_worker.protocol import datagram
from gpuserve_worker.protocol.wire import WireError

logger = logging.getLogger(__name__)

#: Clients at once. Others wait until one of them has gone.
MAX_CLIENTS: Final = 64
#: A client that has asked nothing for so long is let go.
ASK_TIMEOUT_S: Final = 5.0
#: No question is larger.
MAX_ASK_NBYTES: Final = 64 << 10


class ControlSocket:
    """The listeners of one server and their clients, from ``open()`` to ``close()``."""

    def __init__(
        self, reactor: Reactor, ask: Callable[[str, dict[str, Any], Tell, AnswerOutcome], None]
    ) -> None:
        self.ask = ask
        self._reactor = reactor
        self._listener = LocalListener(reactor, self._connected, "operate the server")
        self._clients: set[ControlClient] = set()

    def open(self, ports: Listeners, *, required: bool) -> None:
        """Take clients from now on, by a socket for each port. Raises StartupError: other processes have the
        addresses of a socket, and all sockets are ``required``.
        """
        for listener in ports.sockets.values():
            address, port = listener.getsockname()[:2]
            name = ControlName(os.geteuid(), address, port)
            self._listener.open(
                name.addresses(), f"the server cannot be operated by {name}", required=required
            )

    def close(self) -> None:
        self._listener.close()
        for client in list(self._clients):
            client.close()

    def _connected(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        client = ControlClient(sock, self._reactor, self)
        self._clients.add(client)
        client.open()
        if len(self._clients) >= MAX_CLIENTS:
            self._listener.pause()

    def gone(self, client: ControlClient) -> None:
        self._clients.discard(client)
        if len(self._clients) == MAX_CLIENTS - 1:
            self._listener.resume()


class ControlClient:
    """One client, from ``open()`` to its answer. What it asked for goes on where it has gone away."""

    def __init__(self, sock: socket.socket, reactor: Reactor, server: ControlSocket) -> None:
        self._sock = sock
        self._reactor = reactor
        self._server = server
        self._has_asked = False
        self._is_closed = False

    def open(self) -> None:
        self._reactor.watch(self._sock.fileno(), self._on_readable)
        self._reactor.call_later(ASK_TIMEOUT_S, self._on_ask_timeout)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._reactor.unwatch(self._sock.fileno())
        self._sock.close()
        self._server.gone(self)

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(MAX_ASK_NBYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or self._has_asked or len(data) > MAX_ASK_NBYTES:
            self.close()
            return
        try:
            message = OPERATE.decode(data)
        except WireError as error:
            logger.warning("a command that asks nonsense is let go: %s", error)
            self.close()
            return
        self._heard(message)

    def _heard(self, message: Any) -> None:
        match message:
            case Ask(int(protocol)) if protocol != PROTOCOL:
                text = "the command and the server need the same version of gpuserve"
                self._answer(VerbOutcome(Code.UNIMPLEMENTED.value, text, {}))
            case Ask(int(), str(verb), dict(arguments)):
                self._has_asked = True
                self._reactor.call_later(ALIVE_PERIOD_S, self._say_alive)
                self._server.ask(verb, arguments, lambda text: self._say(Told(text)), self._answer)
            case _:
                logger.warning("a command that asks nonsense is let go")
                self.close()

    def _answer(self, outcome: VerbOutcome) -> None:
        self._say(Answered(*outcome))
        self.close()

    def _say_alive(self) -> None:
        if not self._is_closed:
            self._say(Alive())
            self._reactor.call_later(ALIVE_PERIOD_S, self._say_alive)

    def _say(self, message: Told | Alive | Answered) -> None:
        if not self._is_closed:
            try:
                datagram.send(self._sock, OPERATE.encode(message))
            except OSError:  # a client that does not read is not waited for
                self.close()

    def _on_ask_timeout(self) -> None:
        if not self._has_asked:
            self.close()
