"""One request over HTTP/1 and its response, from the side of who answers it. No byte is read here."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Iterable, Sequence
from time import time
from typing import TYPE_CHECKING, Final

from gpuserve.core.states import StepTable
from gpuserve.front.exchange.exchange import AnswerHead, Header, Piece, Release
from gpuserve.front.server.http1.head import RequestHead
from gpuserve.front.server.http1.response import (
    CLOSE,
    KEEP_ALIVE,
    LAST_CHUNK,
    Framing,
    head_text,
    response_head,
    whole_head,
    with_line,
)

if TYPE_CHECKING:
    from gpuserve.front.server.http1.protocol import Http1

logger = logging.getLogger(__name__)

#: Up to here pieces are joined: one write costs more than the copy.
JOINED_NBYTES: Final = 64 << 10


class Progress(enum.Enum):
    """How far a response is sent."""

    AWAITED = "nothing is known of it"
    STARTED = "its head is known, and waits for the first of its body"
    SENDING = "its head is sent"
    ENDED = "nothing more can be sent: it is complete, or the client is gone"


# Compared in every request: a look-up on an Enum class costs ten times one of a global.
_AWAITED: Final = Progress.AWAITED
ENDED: Final = Progress.ENDED

_PROGRESS: Final = StepTable(
    "a response",
    {
        Progress.AWAITED: {Progress.STARTED, Progress.ENDED},
        Progress.STARTED: {Progress.SENDING, Progress.ENDED},
        Progress.SENDING: {Progress.ENDED},
        Progress.ENDED: (),
    },
)


class Http1Exchange:
    """One request over HTTP/1, an ``Exchange``. ``is_plain``: an encoded head can be sent as it is."""

    __slots__ = (
        "_framing",
        "_http1",
        "_left_nbytes",
        "_start",
        "_waiter",
        "ends",
        "head",
        "is_plain",
        "progress",
        "request",
    )

    _start: tuple[int, tuple[Header, ...]]
    _framing: Framing
    _left_nbytes: int

    def __init__(self, http1: Http1, request: RequestHead, is_plain: bool) -> None:
        self.head = request.head
        self.ends = http1.ends
        self.request = request
        self.is_plain = is_plain
        self.progress = _AWAITED
        self._http1 = http1
        self._waiter: asyncio.Future[None] | None = None

    # ---- the response ---------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self.progress is not Progress.AWAITED

    @property
    def ended(self) -> bool:
        return self.progress is Progress.ENDED

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        if self.progress is not _AWAITED:
            if release is not None:
                release()
            return
        text = whole_head(head.text or head_text(head), nbytes, int(time()))
        if not self.is_plain:
            text, body = self._adapted(text, body)
        self.progress = ENDED
        http1 = self._http1
        if nbytes <= JOINED_NBYTES:
            http1.write(b"".join((text, *body)))
        else:
            release = http1.write_pieces((text, *body), release)
        http1.finished()
        if release is not None:
            release()

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        """Begin the response. Its head leaves with the first part of the body."""
        if self.progress is not Progress.ENDED:
            self._move(Progress.STARTED)
            self._start = status, tuple(headers)
            if end:
                self.send(b"", end=True)

    def send(self, data: bytes, end: bool = False) -> None:
        if self.progress is Progress.ENDED:
            return
        head = b""
        if self.progress is Progress.STARTED:
            head = self._begin(len(data) if end else None)
        if not self._fits(len(data), end=end):
            logger.error("a response is broken off: it is not of the length that its head tells")
            self.reset()
            return
        pieces = self._framed(data, end=end)
        self._http1.write_pieces((head, *pieces), None)
        if end:
            self._end()

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        self.send(b"", end=True)

    def reset(self) -> None:
        if self.progress is not Progress.ENDED:
            # Without its length nothing but an error on the connection says that a body is not complete.
            told = self.progress is not Progress.SENDING or self._framing is not Framing.CLOSED
            self.progress = Progress.ENDED
            self._http1.break_off(politely=told)
            self.wake()

    def _move(self, progress: Progress) -> None:
        self.progress = _PROGRESS.step(self.progress, progress)

    def _begin(self, nbytes: int | None) -> bytes:
        status, headers = self._start
        keep_alive = not self._http1.closes_after(self.request)
        version, method = self.head.http_version, self.head.method
        head = response_head(status, headers, version, method, nbytes=nbytes, keep_alive=keep_alive)
        self._move(Progress.SENDING)
        self._framing, self._left_nbytes = head.framing, head.nbytes
        if not keep_alive or head.framing is Framing.CLOSED:
            self._http1.close_after()
        return head.text

    def _fits(self, nbytes: int, *, end: bool) -> bool:
        if self._framing is not Framing.SIZED:
            return True
        self._left_nbytes -= nbytes
        return self._left_nbytes >= 0 and not (end and self._left_nbytes)

    def _framed(self, data: bytes, *, end: bool) -> Sequence[Piece]:
        match self._framing:
            case Framing.NONE:
                return ()
            case Framing.CHUNKED:
                pieces: tuple[Piece, ...] = (b"%x\r\n" % len(data), data, b"\r\n") if data else ()
                return (*pieces, LAST_CHUNK) if end else pieces
            case _:
                return (data,)

    def _adapted(self, text: bytes, body: Sequence[Piece]) -> tuple[bytes, Sequence[Piece]]:
        """A whole response for a client or a moment that is not the usual one."""
        if self._http1.closes_after(self.request):
            text = with_line(text, CLOSE)
            self._http1.close_after()
        elif self.head.http_version == "1.0":
            text = with_line(text, KEEP_ALIVE)
        return text, () if self.head.method == "HEAD" else body

    def _end(self) -> None:
        self._move(Progress.ENDED)
        self._http1.finished()
        self.wake()

    # ---- the connection -------------------------------------------------------------------

    def consumed(self, nbytes: int) -> None:
        if self.progress is not ENDED:
            self._http1.consumed(nbytes)

    def drop_unsent(self) -> None:
        pass  # all of it is with the socket

    async def room(self) -> None:
        while self.progress is not Progress.ENDED and self._http1.way.full:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.progress is Progress.ENDED:
            raise ConnectionResetError("the client is gone")

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def drop(self) -> None:
        self.progress = Progress.ENDED
        self.wake()
