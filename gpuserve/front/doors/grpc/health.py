"""``grpc.health.v1``: Check and Watch, of whatever source of health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from gpuserve.core.errors import NotFound, Stopping
from gpuserve.front.doors.grpc.calls import small_message
from gpuserve.front.doors.grpc.framing import frame
from gpuserve.front.doors.grpc.headers import OK_HEADERS, CallHead
from gpuserve.front.doors.grpc.requests import decode
from gpuserve.front.doors.grpc.schema import schema
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.v2.health import HealthSource

CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
_REQUEST: Final = "grpc.health.v1.HealthCheckRequest"
#: ``HealthCheckResponse`` with SERVICE_UNKNOWN, which only ``Watch`` sends.
_SERVICE_UNKNOWN: Final = b"\x08\x03"


def message(serving: bool) -> bytes:
    """A serialised ``HealthCheckResponse``: field 1 is 1 (SERVING) or 2 (NOT_SERVING)."""
    return b"\x08\x01" if serving else b"\x08\x02"


def check(source: HealthSource, body: bytes) -> bytes:
    """The answer of ``Check``; InvalidArgument, NotFound: the message is none, or names no service."""
    name = decode(schema().message(_REQUEST), body).service
    serving = source.of(name)
    if serving is None:
        raise NotFound(f"no service {name[:128]!r} to check the health of")
    return message(serving)


async def serve_watch(source: HealthSource, call: CallHead, request: AwaitedRequest) -> None:
    """Answer ``Watch`` until its client goes away; RequestError is its status, Stopping the server's end."""
    body = await small_message(call, request)
    name = decode(schema().message(_REQUEST), body).service
    exchange = request.exchange
    exchange.start(200, OK_HEADERS)
    gone = asyncio.ensure_future(request.until_gone())
    try:
        async for reply in changes(source, name, gone):
            exchange.send(frame(len(reply)) + reply)
            await exchange.room()
    finally:
        gone.cancel()


async def changes(source: HealthSource, name: str, gone: asyncio.Future[None]) -> AsyncIterator[bytes]:
    """The health of a service now and at each change, until ``gone`` is done; Stopping: the front ends."""
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
