"""Calls of gRPC that await, and calls that are refused: what they have in common. No method is known here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeAlias

from gpuserve.core.errors import RequestError
from gpuserve.front.doors.access.failures import error_to_tell
from gpuserve.front.doors.grpc.framing import PREFIX_NBYTES, Unframer, frame, unary_message
from gpuserve.front.doors.grpc.headers import OK, CallHead, refuse
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.exchange.exchange import Exchange, Piece

#: No message of a small call is longer than a few names.
MAX_SMALL_NBYTES: Final = 1 << 20
NO_TRAILERS: Final = (
    "a gRPC call needs the header 'te: trailers', which is missing: "
    "the client or a proxy does not speak gRPC over HTTP/2"
)

#: A method that awaits. It raises the ``RequestError`` that is the status of its call.
Method: TypeAlias = Callable[[CallHead, AwaitedRequest], Awaitable[None]]


async def serve(method: Method, call: CallHead, request: AwaitedRequest) -> None:
    """Run a method; what goes wrong is the status of its call."""
    try:
        await method(call, request)
    except Exception as error:
        if not (request.gone and isinstance(error, OSError)):
            refuse(request.exchange, error_to_tell(error, f"serving {request.head.path}"))


async def small_message(call: CallHead, request: AwaitedRequest) -> bytes:
    """The one message of a small call; RequestError: none, or too large; ClientGone: it will not come."""
    body = await request.body(MAX_SMALL_NBYTES)
    return bytes(unary_message(body, MAX_SMALL_NBYTES, call.encoding))


async def small_messages(call: CallHead, request: AwaitedRequest, max_nbytes: int) -> AsyncIterator[bytes]:
    """The small messages of a stream, until its end; RequestError, or ClientGone: the client has left."""
    unframer = Unframer(max_nbytes, call.encoding)
    while (part := await request.part()) is not None:
        for body in unframer.feed(part):
            yield body
    unframer.finish()


def send_message(exchange: Exchange, message: bytes) -> None:
    """End a call with one message, and that all is well."""
    exchange.answer(OK, (frame(len(message)), message), PREFIX_NBYTES + len(message))


class Refused:
    """Gives a call a status alone, once its request has ended: a status before that may be lost with it."""

    __slots__ = ("_error", "_exchange")

    def __init__(self, error: RequestError, exchange: Exchange) -> None:
        self._error = error
        self._exchange = exchange

    def take(self, data: Piece, end: bool) -> None:
        self._exchange.consumed(len(data))
        if end:
            refuse(self._exchange, self._error)

    def abandon(self) -> None:
        pass


class RefusedStream(Refused):
    """Gives a stream a status alone in the next turn of the loop: its requests need not end."""

    __slots__ = ()

    def __init__(self, error: RequestError, exchange: Exchange) -> None:
        super().__init__(error, exchange)
        asyncio.get_running_loop().call_soon(refuse, exchange, error)

    def take(self, data: Piece, end: bool) -> None:
        self._exchange.consumed(len(data))
