"""Connections of TLS until they are secured. They are counted when they are accepted, cost a descriptor alone
until their client has said something, and the key's work for them is done one after the other, in turns of
those who ask: a flood of handshakes leaves the event loop to others.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Final

from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.exchange.connection import Connection
from gpuserve.front.exchange.limits import Admission, source_of
from gpuserve.front.server.acceptor import Acceptor

#: From the connection to the end of its handshake.
HANDSHAKE_S: Final = 15.0
#: After each one that is begun: the key's work takes a millisecond or two, and what others ask some turns of
#: the loop.
_PAUSE_S: Final = 0.002
#: So many of one address may have begun and not ended: each holds some 100 KiB.
MOST_OF_ADDRESS: Final = 256


class _Caller:
    """A connection that is not secured yet, and the way to give its place back."""

    __slots__ = ("_give_back", "_has_place", "address", "socket", "source", "until_s")

    def __init__(
        self, accepted: socket.socket, address: str | None, give_back: Callable[[], None], until_s: float
    ) -> None:
        self.socket = accepted
        self.address = address
        self.source = source_of(address)
        self.until_s = until_s
        self._give_back = give_back
        self._has_place = True

    def leave(self) -> None:
        """Give the place back, once."""
        if self._has_place:
            self._has_place = False
            self._give_back()


class TlsListener:
    """Accepts on a socket, from now on, those who are admitted, and secures them."""

    def __init__(self, listener: socket.socket, handshakes: Handshakes, admission: Admission) -> None:
        self.handshakes = handshakes
        self._admission = admission
        self._acceptor = Acceptor(listener, self._take)
        self._acceptor.open()

    def close(self) -> None:
        """Accept no more than those who have connected by now, and wait for nobody who says nothing."""
        self._acceptor.close()
        self.handshakes.close()

    def _take(self, accepted: socket.socket, address: str | None) -> None:
        if self._admission.admit(address, accepted.fileno()):
            self.handshakes.take(accepted, address, partial(self._admission.leave, address))
        else:
            accepted.close()


class Handshakes:
    """Secures connections in the running loop. ``made`` makes a connection, and is told how it gives its
    place back. ``context`` is for handshakes from now on.
    """

    def __init__(
        self,
        made: Callable[[Callable[[], None]], Connection],
        admission: Admission,
        context: ssl.SSLContext,
    ) -> None:
        self.context = context
        self._made = made
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        #: Who has said nothing yet; then who waits for its turn, by address.
        self._silent: set[_Caller] = set()
        self._waiting: dict[str | bytes, deque[_Caller]] = {}
        self._begun: Counter[str | bytes] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn_due = False

    @property
    def is_busy(self) -> bool:
        """Whether there are handshakes that have begun, or wait for their turn."""
        return bool(self._tasks or self._waiting)

    def close(self) -> None:
        """Wait for nobody who says nothing."""
        for caller in list(self._silent):
            self._dismiss(caller)

    def check(self, now: float) -> None:
        """Let go who has not begun a handshake in time. Those that have begun see to it themselves."""
        for caller in [one for one in self._silent if now > one.until_s]:
            self._dismiss(caller)
            self._late(caller)
        for source, callers in list(self._waiting.items()):
            while callers and now > callers[0].until_s:
                self._late(callers[0])
                self._drop(callers.popleft())
            if not callers:
                del self._waiting[source]

    # ---- those who come ---------------------------------------------------------------------

    def take(self, accepted: socket.socket, address: str | None, give_back: Callable[[], None]) -> None:
        """Secure a connection that has its place, once its client begins."""
        accepted.setblocking(False)
        caller = _Caller(accepted, address, give_back, self._loop.time() + HANDSHAKE_S)
        self._silent.add(caller)
        self._loop.add_reader(accepted, self._hear, caller)

    def _hear(self, caller: _Caller) -> None:
        """The client has begun its handshake, or is gone."""
        self._loop.remove_reader(caller.socket)
        self._silent.discard(caller)
        self._waiting.setdefault(caller.source, deque()).append(caller)
        self._turn_soon()

    def _dismiss(self, caller: _Caller) -> None:
        self._loop.remove_reader(caller.socket)
        self._silent.discard(caller)
        self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        caller.socket.close()
        caller.leave()

    def _late(self, caller: _Caller) -> None:
        client = None if caller.address is None else (caller.address, 0)
        self._admission.count_late("handshake", client)

    # ---- those who are secured --------------------------------------------------------------

    def _turn_soon(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Begin a handshake, of each address in turn."""
        self._turn_due = False
        for source in self._waiting:
            if self._begun[source] < MOST_OF_ADDRESS:
                break
        else:
            return
        callers = self._waiting.pop(source)
        self._begin(callers.popleft())
        if callers:
            self._waiting[source] = callers  # behind the others
        self._turn_due = True
        self._loop.call_later(_PAUSE_S, self._turn)

    def _begin(self, caller: _Caller) -> None:
        self._begun[caller.source] += 1
        task = self._loop.create_task(self._secure(caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _secure(self, caller: _Caller) -> None:
        connection = self._made(caller.leave)
        left_s = max(0.1, caller.until_s - self._loop.time())
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, caller.socket, ssl=self.context, ssl_handshake_timeout=left_s
            )
        except OSError:  # no TLS, another one's certificate, or the client is gone
            if self._loop.time() > caller.until_s:
                self._late(caller)
        finally:
            if not connection.ends.tls:  # it was never made, and gives nothing back
                caller.leave()
            self._begun[caller.source] -= 1
            if not self._begun[caller.source]:
                del self._begun[caller.source]
            self._turn_soon()


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """What both ends agree on: TLS 1.2 at least, and a certificate of the client's where there is a CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # which costs a server as much as a handshake
    context.load_cert_chain(files.certfile, files.keyfile)
    context.set_alpn_protocols(["h2", "http/1.1"])
    if files.client_ca:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
