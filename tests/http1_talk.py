"""HTTP/1 connections whose way out only records, for tests of what is asked and sent, and when."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence

from recording_way import RecordedWay

from gpuserve.front.net.exchange import (
    AnswerHead,
    Exchange,
    Piece,
    Release,
    RequestHandler,
)
from gpuserve.front.net.http1_protocol import Http1, Http1Exchange

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
OLD_GET = b"GET /a HTTP/1.0\r\n\r\n"
CHUNKED = b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
OK = OK_HEAD + b"ok"
OK_ANSWER = AnswerHead(200, ())


class RecordingWay(RecordedWay):
    """Where a connection would write to."""

    def __init__(self, client: tuple[str, int] = ("127.0.0.1", 5), *, hurried: bool = False) -> None:
        super().__init__(client, tls=False, hurried=hurried)
        self.unsent_nbytes = 0
        self.raw = b""
        self.n_writes = 0
        self.releases: list[Release] = []

    @property
    def sent(self) -> bytes:
        """What was written, without dates."""
        return re.sub(rb"date: [^\r]*\r\n", b"", self.raw)

    def write(self, data: bytes) -> None:
        assert data
        assert not self.said
        self.raw += data
        self.n_writes += 1

    def write_pieces(self, pieces: Sequence[Piece], release: Release | None) -> None:
        self.write(b"".join(pieces))
        if release is not None:
            self.releases.append(release)


class RecordingSink:
    """Collects a body, copied as it must be."""

    def __init__(self, exchange: Exchange, answer: Callable[[Http1Exchange], None] | None) -> None:
        assert isinstance(exchange, Http1Exchange)
        self.exchange = exchange
        self.body = b""
        self.ended = False
        self.abandoned = 0
        self._answer = answer

    def receive_body(self, data: Piece, end: bool) -> None:
        assert not self.ended
        assert not self.abandoned
        self.body += data
        self.ended = end
        if end and self._answer is not None:
            self._answer(self.exchange)

    def abandon(self) -> None:
        self.abandoned += 1


class Talk:
    """One connection and all that was asked on it. ``answer``: what to do once a request is complete;
    ``handler``: accepts requests instead of the scene itself.
    """

    def __init__(
        self,
        answer: Callable[[Http1Exchange], None] | None = None,
        handler: RequestHandler | None = None,
        client: tuple[str, int] = ("127.0.0.1", 5),
        *,
        hurried: bool = False,
    ) -> None:
        self.way = RecordingWay(client, hurried=hurried)
        self.sinks: list[RecordingSink] = []
        self._answer = answer
        self.http1 = Http1(self.way, handler or self.accept)

    def accept(self, exchange: Exchange) -> RecordingSink:
        self.sinks.append(RecordingSink(exchange, self._answer))
        return self.sinks[-1]

    def feed(self, data: bytes, cuts: Sequence[int] = ()) -> Talk:
        """Bytes as the socket gives them: large ones as a view of memory that is used again."""
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for start, end in itertools.pairwise(edges):
            if end - start >= 32 << 10:
                buffer = bytearray(data[start:end])
                self.http1.feed(memoryview(buffer))
                buffer[:] = bytes(len(buffer))
            elif end > start:
                self.http1.feed(data[start:end])
            while self.way.waits:
                self.way.waits = False
                self.http1.resume()
        return self

    @property
    def exchange(self) -> Http1Exchange:
        return self.sinks[-1].exchange

    @property
    def status(self) -> int:
        return int(self.way.sent.split(b" ")[1])

    @property
    def error(self) -> str:
        return str(json.loads(self.way.sent.rpartition(b"\r\n\r\n")[2])["error"])

    def responses(self) -> list[tuple[bytes, bytes]]:
        """(head without its date, body) of responses with a length."""
        found, rest = [], self.way.sent
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            lines = [line for line in head.split(b"\r\n") if not line.startswith(b"date: ")]
            length = next((int(line[16:]) for line in lines if line.startswith(b"content-length: ")), 0)
            found.append((b"\n".join(lines), rest[:length]))
            rest = rest[length:]
        return found


def post(body: bytes, fields: bytes = b"", line: bytes = b"POST /a HTTP/1.1") -> bytes:
    return line + b"\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n" % (len(body), fields) + body


def answer_ok(exchange: Http1Exchange) -> None:
    exchange.answer(OK_ANSWER, (b"ok",), 2)


def early(nbytes: int, sent: bytes, fields: bytes = b"") -> Talk:
    """A request that is answered before its body has come."""
    talk = Talk().feed(
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n" % (nbytes, fields) + sent
    )
    answer_ok(talk.exchange)
    assert talk.sinks[0].abandoned == 1
    return talk


def passes(talk: Talk, seconds: int, start: int = 0) -> Talk:
    for now in range(start, start + seconds + 1):
        talk.http1.check(float(now))
    return talk
