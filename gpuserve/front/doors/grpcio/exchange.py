"""One call of grpc.aio as an ``Exchange``: what the gRPC door takes and gives, over another carrier."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

import grpc

from gpuserve.front.doors.access.peers import UNIX, grpc_address
from gpuserve.front.doors.grpc.framing import PREFIX_NBYTES, frame
from gpuserve.front.doors.grpc.headers import CONTENT_TYPE, RETRY_AFTER, RETRY_PUSHBACK
from gpuserve.front.exchange.exchange import TE, AnswerHead, Ends, Head, Header, Piece, Release, Sink
from gpuserve.front.exchange.limits import source_of

_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
#: A sink is given so much of a message in one turn of the loop, as the transport ``native`` reads it.
_PART_NBYTES: Final = 256 << 10
#: Trailers that tell a client when to retry.
_RETRY_WHEN: Final = frozenset({RETRY_PUSHBACK[0], RETRY_AFTER})
#: The largest time limit that the header of one has digits for, in milliseconds: a day.
_MAX_TIMEOUT_MS: Final = 10**8 - 1


class GrpcAioExchange:
    """One call. grpc takes the framing off messages and puts it on; here it is as on the wire."""

    def __init__(self, path: str, context: Any) -> None:
        self.head = Head("POST", path.encode(), [*_headers(context), TE, CONTENT_TYPE], "2", None)
        address = grpc_address(context.peer())
        self.ends = Ends((address, 0), ("", 0), False, source=source_of(None if address == UNIX else address))
        self.started = self.ended = False
        self._context = context
        self._unsent: deque[bytes] = deque()
        self._trailers: dict[bytes, bytes] = {}
        self._unused_nbytes = 0
        self._changed = asyncio.Event()

    # ---- the door's side ------------------------------------------------------------------

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        self.send(b"".join(body))
        if release is not None:
            release()
        self.finish(head.trailers)

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        self.started = True
        if end:
            self.finish(headers)

    def send(self, data: bytes, end: bool = False) -> None:
        self.started = True
        position = 0
        while position < len(data) and not self.ended:
            start = position + PREFIX_NBYTES
            position = start + int.from_bytes(data[position + 1 : start])
            self._unsent.append(data[start:position])
        self._changed.set()

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        if not self.ended:
            self.ended = True
            self._trailers = dict(trailers)
            self._changed.set()

    def drop_unsent(self) -> None:
        if not self.ended:
            self._unsent.clear()
            self._changed.set()

    def reset(self) -> None:
        self.finish([(b"grpc-status", b"%d" % grpc.StatusCode.INTERNAL.value[0])])

    def consumed(self, nbytes: int) -> None:
        self._unused_nbytes -= nbytes
        self._changed.set()

    async def room(self) -> None:
        await self._until(lambda: not self._unsent)
        if self.ended:
            raise ConnectionResetError("the client is gone")

    # ---- grpc's side ----------------------------------------------------------------------

    async def read(self, messages: AsyncIterator[bytes], sink: Sink) -> None:
        """Give a sink the messages of the client, each once the one before it is used up."""
        async for message in messages:
            self._unused_nbytes += PREFIX_NBYTES + len(message)
            sink.take(frame(len(message)), False)
            for at in range(0, len(message), _PART_NBYTES):
                if at:
                    await asyncio.sleep(0)  # other clients have their turn between two parts
                sink.take(message[at : at + _PART_NBYTES], False)
            await self._until(lambda: self._unused_nbytes <= 0)
        sink.take(b"", True)

    async def replies(self) -> AsyncIterator[bytes]:
        """The messages of the server, until the door ends the call; then grpc is given its status."""
        while self._unsent or not self.ended:
            await self._until(lambda: bool(self._unsent) or self.ended)
            while self._unsent:
                yield self._unsent.popleft()
            self._changed.set()
        code = int(self._trailers[b"grpc-status"])
        if code:
            text = urllib.parse.unquote(self._trailers.get(b"grpc-message", b"").decode())
            metadata = [
                (key.decode(), value.decode()) for key, value in self._trailers.items() if key in _RETRY_WHEN
            ]
            await self._context.abort(_STATUS_CODES[code], text, tuple(metadata))

    def give_up(self) -> None:
        """The client is gone: what is sent is dropped, and nobody waits for it."""
        self.ended = True
        self._unsent.clear()
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _headers(context: Any) -> list[Header]:
    """The metadata of a call, as the headers that carried it; binary values are in no header that we read."""
    given = context.invocation_metadata() or ()
    headers = [(name.encode(), value.encode()) for name, value in given if isinstance(value, str)]
    left_s = context.time_remaining()
    if left_s is not None:
        left_ms = min(max(int(left_s * 1000), 0), _MAX_TIMEOUT_MS)
        headers.append((b"grpc-timeout", b"%dm" % left_ms))
    return headers
