"""Request forwarding in an ingress process: requests go to the front, and its responses to their connections.
Requests are answered here only if their front has died, or if no front is connected for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from gpuserve.core.errors import RequestError
from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress import ipc_channel
from gpuserve.front.ingress.ipc_channel import FrontOutage, IpcChannel, split_into_pieces
from gpuserve.front.net.exchange import AnswerHead, BodyReceiver, Exchange, Head, Piece
from gpuserve.front.protocols.access.authorization import client_uid, depends_on_user

logger = logging.getLogger(__name__)

#: Methods of requests that may be repeated.
_SAFE: Final = frozenset({"GET", "HEAD"})
#: The most cached heads of responses, each of which a connection encodes once.
_REMEMBERED: Final = 256


class RequestForwarder:
    """Forwards the requests that it accepts; ``handlers`` are for the front's messages. During an ``outage``
    requests wait. ``refuse`` ends an exchange with an error. A repeatable request of a dead front waits for
    the next one unless it ``is_urgent``.
    """

    def __init__(
        self,
        channel: IpcChannel,
        outage: FrontOutage,
        refuse: Callable[[Exchange, RequestError], None],
        is_urgent: Callable[[Head], bool] = lambda _: False,
    ) -> None:
        self._channel = channel
        self._outage = outage
        self.refuse = refuse
        self.is_urgent = is_urgent
        self._numbers = itertools.count()
        self._open: dict[int, ForwardedRequest] = {}
        self.answer_head = functools.lru_cache(_REMEMBERED)(AnswerHead)
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            message: partial(self._dispatch, act)
            for message, act in (
                (messages.WholeResponsePart, ForwardedRequest.add),
                (messages.WholeResponse, ForwardedRequest.answer),
                (messages.ResponseStart, ForwardedRequest.start),
                (messages.ResponseData, ForwardedRequest.send),
                (messages.DropUnsent, lambda one, _: one.exchange.drop_unsent()),
                (messages.ResponseEnd, ForwardedRequest.finish),
                (messages.ResponseReset, lambda one, _: one.abort()),
                (messages.BodyConsumed, lambda one, message: one.exchange.consumed(message.nbytes)),
            )
        }

    @property
    def n_open(self) -> int:
        """Return the number of requests that the front has not answered."""
        return len(self._open)

    def accept(self, exchange: Exchange) -> BodyReceiver:
        number = next(self._numbers)
        one = self._open[number] = ForwardedRequest(self, exchange, number, exchange.head.method in _SAFE)
        head, ends = exchange.head, exchange.endpoints
        user = client_uid(exchange) if depends_on_user(head) else None
        if self._outage.is_active:
            one.hold(self._outage)
        head_fields = head.method, head.target, tuple(head.headers), head.http_version, head.content_length
        end_fields = ends.client, ends.server, ends.tls
        one.post(messages.RequestOpened(number, *head_fields, head.scheme, head.spelled, *end_fields, user))
        return one

    def post(self, message: Any) -> None:
        self._channel.post(message)

    def on_front_died(self) -> None:
        """Hold the repeatable requests of the dead front for the next one, once, and fail the others."""
        for one in list(self._open.values()):
            if not one.hold_for_retry(self._outage):
                one.fail(ipc_channel.front_died())

    def is_open(self, number: int) -> bool:
        """Return whether a request has no answer yet, and its client still waits."""
        return number in self._open

    def forget(self, number: int) -> bool:
        """Forget a request. Returns False if it was not known."""
        return self._open.pop(number, None) is not None

    def _dispatch(self, act: Callable[[ForwardedRequest, Any], None], message: Any) -> None:
        one = self._open.get(message.exchange)
        if one is None:
            return  # the client left while the message was on its way
        try:
            act(one, message)
        except Exception:
            logger.exception("server defect: aborted a request")
            one.abort()


class ForwardedRequest:
    """A forwarded request: the receiver of its body, and the handler of the front's messages about it."""

    __slots__ = (
        "_forwarding", "_held", "_number", "_parts", "_replay", "_uncredited_nbytes", "_waiting", "exchange",
    )  # fmt: skip

    def __init__(self, forwarding: RequestForwarder, exchange: Exchange, number: int, is_safe: bool) -> None:
        self._forwarding = forwarding
        self.exchange = exchange
        self._number = number
        #: The messages for the next front, while none is connected.
        self._held: list[Any] | None = None
        #: The messages about a repeatable request without a body, for another front.
        self._replay: list[Any] | None = [] if is_safe else None
        #: The parts of an incomplete response body.
        self._parts: list[bytes] = []
        #: The received bytes for which no credit was granted.
        self._uncredited_nbytes = 0
        self._waiting: asyncio.Task[None] | None = None

    # ---- the connection's side ------------------------------------------------------------

    def receive_body(self, data: Piece, end: bool) -> None:
        if data:
            self._replay = None
        *parts, last = split_into_pieces((data,), len(data))
        for part in parts:
            self.post(messages.RequestBody(self._number, bytes(part), False))
        self.post(messages.RequestBody(self._number, bytes(last), end))

    def abandon(self) -> None:
        self._parts.clear()
        if self._forwarding.forget(self._number) and self._held is None:
            self._forwarding.post(messages.RequestAborted(self._number))

    # ---- without a front ------------------------------------------------------------------

    def hold(self, outage: FrontOutage) -> None:
        """Keep messages until a front is connected."""
        self._held = []
        outage.hold(self._resume, self.fail)

    def hold_for_retry(self, outage: FrontOutage) -> bool:
        """Hold all messages for the next front. Returns False if the request must not be repeated."""
        replay, self._replay = self._replay, None
        if replay is None or self._parts or self.exchange.started:
            return False
        if self._forwarding.is_urgent(self.exchange.head):
            return False
        self.hold(outage)
        self._held = replay
        return True

    def post(self, message: Any) -> None:
        if self._held is None:
            self._forwarding.post(message)
            if self._replay is not None:
                self._replay.append(message)
        else:
            self._held.append(message)

    def fail(self, error: RequestError) -> None:
        """End with an error. An HTTP response that has begun can only be aborted."""
        self._parts.clear()
        if self._held is not None:
            self._held.clear()
        if not self._forwarding.forget(self._number):
            return
        if self.exchange.started and not self.exchange.head.is_grpc:
            self.exchange.reset()
        else:
            self._forwarding.refuse(self.exchange, error)

    def _resume(self) -> None:
        held, self._held = self._held, None
        if self._forwarding.is_open(self._number):
            for message in held or ():
                self.post(message)

    # ---- the front's side -----------------------------------------------------------------

    def add(self, message: messages.WholeResponsePart) -> None:
        self._parts.append(message.data)
        self._forwarding.post(messages.ResponseCredit(self._number, len(message.data)))

    def answer(self, message: messages.WholeResponse) -> None:
        body, self._parts = (*self._parts, message.body), []
        head = self._forwarding.answer_head(message.status, message.headers, message.trailers)
        self._forwarding.forget(self._number)
        self.exchange.answer(head, body, sum(map(len, body)))

    def start(self, message: messages.ResponseStart) -> None:
        if message.end:
            self._forwarding.forget(self._number)
        self.exchange.start(message.status, message.headers, message.end)

    def send(self, message: messages.ResponseData) -> None:
        if message.end:
            self._forwarding.forget(self._number)
        self.exchange.send(message.data, message.end)
        self._uncredited_nbytes += len(message.data)
        is_due = self._uncredited_nbytes >= ipc_channel.CREDIT_NBYTES
        if is_due and self._waiting is None and not self.exchange.ended:
            self._waiting = asyncio.get_running_loop().create_task(self._grant_credit())

    def finish(self, message: messages.ResponseEnd) -> None:
        self._forwarding.forget(self._number)
        self.exchange.finish(message.trailers)

    def abort(self) -> None:
        self._forwarding.forget(self._number)
        self.exchange.reset()

    async def _grant_credit(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            await self.exchange.room()
            self._waiting = None
            nbytes, self._uncredited_nbytes = self._uncredited_nbytes, 0
            self._forwarding.post(messages.ResponseCredit(self._number, nbytes))
