"""Sends the body of a response whose pieces may be views of a worker's memory. Both doors use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpuserve.front.endpoint.asgi import Send

#: The most that one ASGI message holds. Every piece is copied once, into the ``bytes`` that ASGI wants;
#: up to here the whole body is one message, since each costs a hand-over to the server's threads.
MESSAGE_NBYTES: Final = 2 << 20


async def send_body(send: Send, pieces: Sequence[bytes | memoryview]) -> None:
    """Send the pieces one after the other as one body, and end it."""
    if len(pieces) == 1 and type(pieces[0]) is bytes and len(pieces[0]) <= MESSAGE_NBYTES:
        await send({"type": "http.response.body", "body": pieces[0], "more_body": False})
        return
    parts = _parts(pieces)
    part = next(parts)
    for following in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = following
    await send({"type": "http.response.body", "body": part, "more_body": False})


def _parts(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    """The same bytes as messages of up to ``MESSAGE_NBYTES``, at least one."""
    held: list[bytes | memoryview] = []
    room = MESSAGE_NBYTES
    for piece in pieces:
        view = memoryview(piece)
        while len(view) > room:
            yield b"".join([*held, view[:room]])
            view, held, room = view[room:], [], MESSAGE_NBYTES
        held.append(view)
        room -= len(view)
    yield b"".join(held)
