"""Compression of inference responses over gRPC, for clients that can read it: around the gRPC door over ASGI.

``grpc_framing`` reads compressed messages, this writes them. A message that does not get smaller goes as it
is, which its flag says.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Final

from gpuserve.front.endpoint.asgi import MODEL_INFER, MODEL_STREAM_INFER, Application, Receive, Scope, Send
from gpuserve.front.endpoint.grpc_framing import PREFIX, PREFIX_NBYTES, WINDOW_BITS
from gpuserve.front.endpoint.offload import offload

#: Level as in the settings -> zlib's; "none" is not here.
LEVELS: Final[dict[str, int]] = {"low": 1, "medium": 6, "high": 9}
_ACCEPT_ENCODING: Final = b"grpc-accept-encoding"
#: gzip first: every client has it.
_PREFERENCE: Final = ("gzip", "deflate")
#: Shorter messages do not get smaller.
_LEAST_NBYTES: Final = 64
_METHODS: Final = frozenset({MODEL_INFER, MODEL_STREAM_INFER})


class CompressedInference:
    """The gRPC door with inference responses compressed as far as their clients read that."""

    def __init__(self, door: Application, level: str) -> None:
        self._door = door
        self._level = LEVELS[level]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        coding = coding_for(scope["headers"]) if scope["path"] in _METHODS else ""
        if coding:
            send = self._compressing(coding, send)
        await self._door(scope, receive, send)

    def _compressing(self, coding: str, send: Send) -> Send:
        frames = FrameCompressor(coding, self._level)

        async def compressed(event: dict[str, Any]) -> None:
            if event["type"] == "http.response.start" and event.get("trailers"):
                event = {**event, "headers": [*event["headers"], (b"grpc-encoding", coding.encode())]}
            elif body := event.get("body"):
                event = {**event, "body": await offload(len(body), frames.feed, body)}
            await send(event)

        return compressed


def coding_for(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The coding that the client of a call with these headers reads; "" where it reads none of ours."""
    accepted: set[str] = set()
    for name, value in headers:
        if name == _ACCEPT_ENCODING:
            accepted.update(one.strip() for one in value.decode("latin-1").split(","))
    return next((one for one in _PREFERENCE if one in accepted), "")


class FrameCompressor:
    """Takes framed messages in any cut, and gives each one compressed once it is complete."""

    def __init__(self, coding: str, level: int) -> None:
        self._coding = coding
        self._level = level
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> bytes:
        """The messages that this completes, framed and compressed."""
        self._buffer += data
        parts: list[bytes] = []
        position = 0
        with memoryview(self._buffer) as buffered:
            while (end := _end_of_frame(buffered, position)) is not None:
                parts.append(self._compressed(bytes(buffered[position:end])))
                position = end
        del self._buffer[:position]
        return b"".join(parts)

    def _compressed(self, framed: bytes) -> bytes:
        message = memoryview(framed)[PREFIX_NBYTES:]
        if len(message) < _LEAST_NBYTES:
            return framed
        compressor = zlib.compressobj(self._level, zlib.DEFLATED, WINDOW_BITS[self._coding])
        packed = compressor.compress(message) + compressor.flush()
        return PREFIX.pack(1, len(packed)) + packed if len(packed) < len(message) else framed


def _end_of_frame(data: memoryview, position: int) -> int | None:
    """Where the message that begins at ``position`` ends; None where it is not complete."""
    if len(data) < position + PREFIX_NBYTES:
        return None
    end: int = position + PREFIX_NBYTES + PREFIX.unpack_from(data, position)[1]
    return end if end <= len(data) else None
