"""The smallest ASGI application under h2corn: every request is answered with its own body.

``python -m benchmarks.models.asgi_echo PORT...``. Settings of h2corn are those of the front.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import h2corn
import uvloop

_GRPC: Final = b"application/grpc"


async def echo(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """One request; a gRPC call also gets its status in trailers."""
    message = await receive()
    body = message.get("body", b"")
    if message.get("more_body"):
        parts = [body]
        while message.get("more_body"):
            message = await receive()
            parts.append(message.get("body", b""))
        body = b"".join(parts)
    grpc = (b"content-type", _GRPC) in scope["headers"]
    head = [(b"content-type", _GRPC)] if grpc else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head, "trailers": grpc})
    await send({"type": "http.response.body", "body": body})
    if grpc:
        await send({"type": "http.response.trailers", "headers": [(b"grpc-status", b"0")]})


async def serve(ports: list[str]) -> None:
    """Until SIGTERM."""
    config = h2corn.Config(
        bind=tuple(f"127.0.0.1:{port}" for port in ports),
        grpc=True,
        runtime_threads=1 if len(os.sched_getaffinity(0)) <= 2 else 2,
        lifespan="off",
        access_log=False,
        max_concurrent_streams=4096,
        max_request_body_size=0,
        timeout_graceful_shutdown=1.0,
    )
    server: Any = h2corn.Server(echo, config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.shutdown)
    await server.serve()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))
