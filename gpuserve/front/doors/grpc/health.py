"""``grpc.health.v1``: Check and Watch, of whatever source of health, without a package for two messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from gpuserve.errors import InvalidArgument, NotFound, Stopping
from gpuserve.front.doors.grpc.framing import frame, unary_message
from gpuserve.front.doors.grpc.headers import OK_HEADERS, CallHead
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.v2.health import HealthSource

CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
#: No request is longer than the name of a service.
MAX_REQUEST_NBYTES: Final = 1 << 20
#: ``HealthCheckResponse`` with SERVICE_UNKNOWN, which only ``Watch`` sends.
_SERVICE_UNKNOWN: Final = b"\x08\x03"


def message(serving: bool) -> bytes:
    """A serialised ``HealthCheckResponse``: field 1 is 1 (SERVING) or 2 (NOT_SERVING)."""
    return b"\x08\x01" if serving else b"\x08\x02"


def check(source: HealthSource, body: bytes) -> bytes:
    """The answer of ``Check``.

    Raises:
        InvalidArgument, NotFound: the message is none, or names no service.
    """
    name = service_of(body)
    serving = source.of(name)
    if serving is None:
        raise NotFound(f"no service {name[:128]!r} to check the health of")
    return message(serving)


async def serve_watch(source: HealthSource, call: CallHead, request: AwaitedRequest) -> None:
    """Answer ``Watch`` until its client goes away.

    Raises:
        RequestError: the status that the call is to end with; Stopping at the end of the server.
    """
    body = await request.body(MAX_REQUEST_NBYTES)
    name = service_of(bytes(unary_message(body, MAX_REQUEST_NBYTES, call.encoding)))
    exchange = request.exchange
    exchange.start(200, OK_HEADERS)
    gone = asyncio.ensure_future(request.until_gone())
    try:
        async for reply in changes(source, name, gone):
            exchange.send(frame(len(reply)) + reply)
            await exchange.room()
    finally:
        gone.cancel()


def service_of(body: bytes) -> str:
    """The one field of a ``HealthCheckRequest`` (1: service), without a package for two messages.

    Raises:
        InvalidArgument: the bytes are none.
    """
    name, position = b"", 0
    while position < len(body):
        if body[position] != 0x0A:
            raise InvalidArgument("the request body is not a HealthCheckRequest")
        length, position = _varint(body, position + 1)
        name = body[position : position + length]
        if len(name) < length:
            raise InvalidArgument("the request body is not a HealthCheckRequest: it is truncated")
        position += length
    return name.decode("utf-8", "replace")


async def changes(source: HealthSource, name: str, gone: asyncio.Future[None]) -> AsyncIterator[bytes]:
    """The health of a service now, and again whenever it changes, until ``gone`` is done.

    Raises:
        Stopping: the front ends.
    """
    changed = asyncio.Event()
    unwatch = source.watch(changed.set)
    said: bytes | None = None
    try:
        while not gone.done():
            serving = source.of(name)
            reply = _SERVICE_UNKNOWN if serving is None else message(serving)
            if reply != said:
                said = reply
                yield reply
            if source.ended:
                raise Stopping("the server is shutting down")
            await _either(changed, gone)
            changed.clear()
    finally:
        unwatch()


async def _either(changed: asyncio.Event, gone: asyncio.Future[None]) -> None:
    waiting = asyncio.ensure_future(changed.wait())
    either: set[asyncio.Future[Any]] = {waiting, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _varint(body: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(body) and shift < 64:
        byte = body[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
    raise InvalidArgument("the request body is not a HealthCheckRequest: its protobuf encoding is malformed")
