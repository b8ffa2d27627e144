"""Forwarded requests in the front: each is an ``Exchange``, answered like one at a connection of the front.
Responses are sent in pieces, of which a few are on their way at a time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress.ipc_channel import WINDOW_NBYTES, IpcChannel, split_into_pieces
from gpuserve.front.net import exchange as net
from gpuserve.front.net.admission import source_of
from gpuserve.front.net.exchange import BodyReceiver, Header, Piece, Release, RequestHandler

logger = logging.getLogger(__name__)

#: The most cached heads per ingress process, and the largest size of each.
_REMEMBERED: Final = 1024
_REMEMBERED_NBYTES: Final = 4096
#: The unsent bytes above which ``room`` waits.
_UNSENT_NBYTES: Final = 256 << 10
#: The consumed bytes of a complete body that are not credited: the client gets the credit with the answer.
_UNCREDITED_NBYTES: Final = 8 << 10


#: The last message of a response.
_Last: TypeAlias = (
    messages.WholeResponse | messages.ResponseStart | messages.ResponseData | messages.ResponseEnd
)


class ForwardedExchanges:
    """The unanswered forwarded requests of one ingress process. ``handlers`` are for its messages."""

    def __init__(self, channel: IpcChannel, accept: RequestHandler) -> None:
        self._channel = channel
        self._accept = accept
        self._open: dict[int, ForwardedExchange] = {}
        self._head = functools.lru_cache(_REMEMBERED)(net.Head)
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            messages.RequestOpened: self._on_opened,
            messages.RequestBody: partial(self._dispatch, ForwardedExchange.on_body),
            messages.ResponseCredit: partial(self._dispatch, ForwardedExchange.on_sent),
            messages.RequestAborted: partial(self._dispatch, lambda exchange, _: exchange.drop()),
        }

    @property
    def n_open(self) -> int:
        """Return the number of requests that are not over."""
        return len(self._open)

    def close(self) -> None:
        """Abort all requests, because the ingress process and its connections are gone."""
        for exchange in list(self._open.values()):
            self._guard(exchange, exchange.drop)

    def post(self, message: Any) -> None:
        self._channel.post(message)

    def forget(self, number: int) -> None:
        self._open.pop(number, None)

    def _on_opened(self, opened: messages.RequestOpened) -> None:
        _, method, target, headers, version, content_length, scheme, spelled, *_ = opened
        fields = method, target, headers, version, content_length, scheme, spelled
        nbytes = len(target) + sum([len(name) + len(value) for name, value in headers])
        # Equal heads share one object, for results derived from it.
        make = self._head if nbytes <= _REMEMBERED_NBYTES else net.Head
        source = source_of(opened.client and opened.client[0])
        ends = net.ConnectionEndpoints(
            opened.client, opened.server, opened.tls, source=source, user=opened.user
        )
        exchange = ForwardedExchange(self, opened.exchange, make(*fields), ends)
        self._open[opened.exchange] = exchange
        self._guard(exchange, partial(exchange.open, self._accept))

    def _dispatch(self, act: Callable[[ForwardedExchange, Any], None], message: Any) -> None:
        exchange = self._open.get(message.exchange)
        if exchange is not None:  # otherwise it ended while the message was on its way
            self._guard(exchange, partial(act, exchange, message))

    def _guard(self, exchange: ForwardedExchange, act: Callable[[], None]) -> None:
        """Call ``act``. A defect aborts its request, without effect on other requests."""
        try:
            act()
        except Exception:
            logger.exception("server defect: aborted a request")
            exchange.reset()


class ForwardedExchange:
    """One request at a connection of an ingress process: an ``Exchange``."""

    __slots__ = (
        "_body_ended", "_exchanges", "_is_over", "_last", "_number", "_on_way_nbytes", "_release", "_sink",
        "_uncredited_nbytes", "_unsent", "_unsent_nbytes", "_waiter", "ended", "endpoints", "head", "started",
    )  # fmt: skip

    def __init__(
        self, exchanges: ForwardedExchanges, number: int, head: net.Head, ends: net.ConnectionEndpoints
    ) -> None:
        self.head = head
        self.endpoints = ends
        self._exchanges = exchanges
        self._number = number
        #: Whether the response has begun; whether it is complete here, and the rest is sent as the ingress
        #: process grants credit; and whether all was sent, or nobody waits for it.
        self.started = self.ended = self._is_over = False
        self._sink: BodyReceiver | None = None
        self._body_ended = False
        self._uncredited_nbytes = 0
        #: The unsent parts of the response, and its last message.
        self._unsent: deque[Piece] = deque()
        self._last: _Last | None = None
        self._unsent_nbytes = 0
        self._on_way_nbytes = 0
        self._release: Release | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- from the ingress process ---------------------------------------------------------------

    def open(self, accept: RequestHandler) -> None:
        sink = accept(self)
        if self.ended:
            sink.abandon()
        else:
            self._sink = sink

    def on_body(self, body: messages.RequestBody) -> None:
        self._body_ended = body.end
        if self._sink is not None:
            self._sink.receive_body(body.data, body.end)

    def on_sent(self, sent: messages.ResponseCredit) -> None:
        self._on_way_nbytes -= sent.nbytes
        self._push()
        if not self._is_full:
            net.wake(self._waiter)

    def drop(self) -> None:
        """Abort the response, because nobody waits for it."""
        sink, self._sink = self._sink, None
        self._complete()
        if sink is not None:
            sink.abandon()

    # ---- the response ---------------------------------------------------------------------

    def answer(
        self, head: net.AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        if self.started:
            if release is not None:
                release()
            return
        *parts, last = split_into_pieces(body, nbytes)
        self._release = release
        self._queue(parts)
        self._end(messages.WholeResponse(self._number, head.status, head.headers, head.trailers, bytes(last)))

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        if self.ended:
            return
        message = messages.ResponseStart(self._number, status, tuple(headers), end)
        if end:
            self._end(message)
        else:
            self.started = True
            self._exchanges.post(message)

    def send(self, data: bytes, end: bool = False) -> None:
        if self.ended:
            return
        *parts, last = split_into_pieces((data,), len(data))
        self._queue(parts)
        if end:
            self._end(messages.ResponseData(self._number, bytes(last), True))
        else:
            self._queue((last,))
            self._push()

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        if not self.ended:
            self._end(messages.ResponseEnd(self._number, tuple(trailers)))

    def drop_unsent(self) -> None:
        if not self.ended:
            self._unsent.clear()
            self._unsent_nbytes = 0
            self._exchanges.post(messages.DropUnsent(self._number))
            net.wake(self._waiter)

    def reset(self) -> None:
        if not self._is_over:
            self._exchanges.post(messages.ResponseReset(self._number))
            self.drop()

    def consumed(self, nbytes: int) -> None:
        if self.ended:
            return
        self._uncredited_nbytes += nbytes
        if self._uncredited_nbytes > (_UNCREDITED_NBYTES if self._body_ended else 0):
            self._exchanges.post(messages.BodyConsumed(self._number, self._uncredited_nbytes))
            self._uncredited_nbytes = 0

    async def room(self) -> None:
        while self._is_full and not self._is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_over:
            raise ConnectionResetError("the client is gone")

    # ---- what of it has gone --------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._unsent_nbytes + self._on_way_nbytes > _UNSENT_NBYTES

    def _queue(self, parts: Sequence[Piece]) -> None:
        for part in parts:
            self._unsent.append(part)
            self._unsent_nbytes += len(part)

    def _end(self, last: _Last) -> None:
        """Complete the response. A sink that still gets the body is told to ignore the rest."""
        self.started = self.ended = True
        self._last = last
        sink, self._sink = self._sink, None
        self._push()
        if sink is not None and not self._body_ended:
            sink.abandon()

    def _push(self) -> None:
        is_whole = isinstance(self._last, messages.WholeResponse)
        while self._unsent and self._on_way_nbytes < WINDOW_NBYTES:
            part = bytes(self._unsent.popleft())
            self._unsent_nbytes -= len(part)
            self._on_way_nbytes += len(part)
            data = messages.ResponseData(self._number, part, False)
            self._exchanges.post(messages.WholeResponsePart(self._number, part) if is_whole else data)
        if self._last is not None and not self._unsent:
            self._exchanges.post(self._last)
            self._complete()

    def _complete(self) -> None:
        if self._is_over:
            return
        self.started = self.ended = self._is_over = True
        self._exchanges.forget(self._number)
        self._unsent.clear()
        net.wake(self._waiter)
        release, self._release = self._release, None
        if release is not None:
            release()
