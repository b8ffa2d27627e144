"""The body of an HTTP request that is read as a whole, because it is short."""

from __future__ import annotations

import asyncio

from gpuserve.errors import InvalidArgument
from gpuserve.front.endpoint.asgi import Receive


async def read_body(receive: Receive, limit_nbytes: int) -> bytes:
    """The whole body.

    Raises:
        InvalidArgument: it is over the limit.
        CancelledError: the client is gone.
    """
    parts: list[bytes] = []
    nbytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        parts.append(message.get("body", b""))
        nbytes += len(parts[-1])
        more = message.get("more_body", False)
        if nbytes > limit_nbytes:
            raise InvalidArgument(f"the request body is over the limit of {limit_nbytes} bytes")
    return b"".join(parts)
