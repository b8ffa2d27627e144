"""Both ends of an IPC channel in one loop: an ingress process that forwards every request, and the front."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from gpuserve.front.ingress.forwarded import ForwardedExchanges
from gpuserve.front.ingress.forwarding import RequestForwarder
from gpuserve.front.ingress.ipc_channel import FrontOutage, IpcChannel
from gpuserve.front.net.exchange import (
    AnswerHead,
    ConnectionEndpoints,
    Exchange,
    Head,
    Header,
    Piece,
    Release,
    RequestHandler,
)
from gpuserve.front.net.exchange import BodyReceiver as SinkOfBody
from gpuserve.front.protocols.router import refuse

#: Loop iterations without a message after which the channel counts as quiet: a message takes two.
_QUIET_TURNS = 6
ENDS = ConnectionEndpoints(("127.0.0.1", 5), ("127.0.0.1", 80), tls=False)
HEAD = Head("POST", b"/a?b", ((b"host", b"x"),), "1.1", None)


class Way:
    """A real socket pair between an ingress process and the request handler of the front."""

    def __init__(self, accept: RequestHandler) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.n_messages = 0
        self.lost: list[str] = []
        #: The most bytes that waited at either end for the peer to read.
        self.most_waiting_nbytes = 0
        self.front = IpcChannel(ours, self._on_front, lambda: self.lost.append("front"))
        self.ingress = IpcChannel(theirs, self._on_ingress, lambda: self.lost.append("ingress"))
        self.forwarded = ForwardedExchanges(self.front, accept)
        self.forwarding = RequestForwarder(self.ingress, FrontOutage(), refuse)
        self.front.open()
        self.ingress.open()

    def _on_front(self, message: Any, fds: list[int]) -> None:
        self._note(message)
        self.forwarded.handlers[type(message)](message)

    def _on_ingress(self, message: Any, fds: list[int]) -> None:
        self._note(message)
        self.forwarding.handlers[type(message)](message)

    def _note(self, message: Any) -> None:
        self.n_messages += 1
        waiting_nbytes = max(self.front.waiting_nbytes, self.ingress.waiting_nbytes)
        self.most_waiting_nbytes = max(self.most_waiting_nbytes, waiting_nbytes)

    async def settle(self) -> None:
        """Run the loop until no more messages arrive."""
        n_quiet = 0
        while n_quiet < _QUIET_TURNS:
            before = self.n_messages
            await asyncio.sleep(0)
            n_quiet = n_quiet + 1 if self.n_messages == before else 0

    def close(self) -> None:
        self.forwarded.close()
        self.front.close()
        self.ingress.close()


class IngressExchange:
    """A request at an ingress process whose client reads when a test says so: a conforming ``Exchange``."""

    def __init__(self, head: Head = HEAD, ends: ConnectionEndpoints = ENDS) -> None:
        self.head = head
        self.endpoints = ends
        self.started = self.ended = False
        #: Whether the client left before the response was complete.
        self.is_gone = False
        self.sink: SinkOfBody | None = None
        self.status = 0
        self.headers: tuple[Header, ...] = ()
        self.trailers: tuple[Header, ...] = ()
        self.body = b""
        self.is_whole = self.is_broken = False
        self.n_dropped = 0
        self.consumed_nbytes = 0
        self.has_room = True
        self._body_ended = False
        self._waiters: list[asyncio.Future[None]] = []

    # ---- the client's side ----------------------------------------------------------------

    def open(self, accept: RequestHandler) -> IngressExchange:
        self.sink = accept(self)
        return self

    def come(self, data: bytes, end: bool = False) -> None:
        """Receive a part of the body; ignore the part once the response has ended."""
        if self.sink is not None and not self._body_ended:
            self._body_ended = end
            self.sink.receive_body(memoryview(bytearray(data)), end)

    def leave(self) -> None:
        sink, self.sink = self.sink, None
        self.is_gone = self.is_gone or not self.ended
        self.ended = True
        self._wake()
        if sink is not None:
            sink.abandon()

    def read(self, has_room: bool) -> None:
        self.has_room = has_room
        self._wake()

    # ---- an exchange ----------------------------------------------------------------------

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        assert not self.started
        assert nbytes == sum(map(len, body))
        self.start(head.status, head.headers)
        self.body = b"".join(body)
        self.is_whole = True
        self.finish(head.trailers)
        if release is not None:
            release()

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        assert not self.started
        if not self.ended:
            self.started, self.status, self.headers = True, status, tuple(headers)
        if end:
            self._end()

    def send(self, data: bytes, end: bool = False) -> None:
        if not self.ended:
            assert self.started
            self.body += data
        if end:
            self._end()

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        if not self.ended:
            self.trailers = tuple(trailers)
            self._end()

    def drop_unsent(self) -> None:
        self.n_dropped += 1

    def reset(self) -> None:
        self.is_broken = True
        self.leave()

    def consumed(self, nbytes: int) -> None:
        self.consumed_nbytes += nbytes

    async def room(self) -> None:
        while not self.has_room and not self.ended:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self.is_gone:
            raise ConnectionResetError("the client is gone")

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            sink, self.sink = self.sink, None
            if sink is not None and not self._body_ended:
                sink.abandon()
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class FrontSink:
    """Collects a body in the front, and holds the exchange to answer by."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.body = bytearray()
        self.ended = False
        self.n_abandoned = 0

    def receive_body(self, data: Piece, end: bool) -> None:
        assert not self.ended
        assert not self.n_abandoned
        self.body += data
        self.ended = end

    def abandon(self) -> None:
        self.n_abandoned += 1
