"""A gRPC call over ASGI: its ends, its body, and how a message or a status is sent. It knows no method."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, NamedTuple

from gpuserve.errors import RequestError, ResourceExhausted
from gpuserve.front.endpoint.asgi import Receive, Scope, Send
from gpuserve.front.endpoint.grpc_framing import frame
from gpuserve.front.endpoint.grpc_headers import (
    OK_HEADERS,
    OK_TRAILERS,
    encoding_of,
    refusal_headers,
    status_trailers,
    timeout_s_of,
)
from gpuserve.front.endpoint.grpc_stream import STRICT_ERRORS

START: Final = {"type": "http.response.start", "status": 200, "headers": OK_HEADERS, "trailers": True}
OK: Final = {"type": "http.response.trailers", "headers": OK_TRAILERS}


class Call(NamedTuple):
    """One call: its ASGI ends and what its headers say; ``encoding`` is "" for identity.

    ``strict_errors``: the first error of a stream is to be its status. ``headers`` are as they came.
    """

    path: str
    receive: Receive
    send: Send
    encoding: str
    timeout_s: float | None
    strict_errors: bool
    headers: list[tuple[bytes, bytes]]


def call_of(scope: Scope, receive: Receive, send: Send) -> Call:
    """What an ASGI server was asked."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    return Call(
        scope["path"],
        receive,
        send,
        encoding_of(headers),
        timeout_s_of(headers),
        headers.get(STRICT_ERRORS.encode()) == b"true",
        scope["headers"],
    )


async def read_rest(receive: Receive, body: bytes, limit_nbytes: int) -> bytes:
    """The body from what was read of it on.

    Raises:
        ResourceExhausted: it is larger than the limit.
        CancelledError: the client went away.
    """
    parts = [body]
    nbytes = len(body)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        part = message.get("body", b"")
        parts.append(part)
        nbytes += len(part)
        if nbytes > limit_nbytes:
            raise ResourceExhausted(f"the request body is over the limit of {limit_nbytes} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def refuse(send: Send, error: RequestError) -> None:
    """Trailers-Only: the status is in the headers, and there is no body."""
    headers = refusal_headers(error)
    with contextlib.suppress(OSError):  # the client is gone
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def end(send: Send, error: RequestError) -> None:
    """A status after messages: it is in the trailers."""
    with contextlib.suppress(OSError):  # the client is gone
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await send({"type": "http.response.trailers", "headers": status_trailers(error)})


async def respond(send: Send, message: bytes) -> None:
    """One message, and that all is well."""
    with contextlib.suppress(OSError):  # the client is gone
        await send(START)
        await send({"type": "http.response.body", "body": frame(len(message)) + message, "more_body": False})
        await send(OK)
