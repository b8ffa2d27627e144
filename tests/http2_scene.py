"""HTTP/2 connections of the server with a way out that records, and a client's end to talk to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from http2_peer import Frame, Peer
from recording_way import RecordedWay

from gpuserve.front.net.admission import Admission
from gpuserve.front.net.exchange import Exchange, Piece, Release, RequestHandler
from gpuserve.front.net.http2_protocol import Http2
from gpuserve.front.net.http2_streams import Stream

READ_NBYTES = 256 << 10
#: What is called for each part of a request.
Answer: TypeAlias = "Callable[[BodyReceiver, bool], None]"


class RecordingWay(RecordedWay):
    """Where a connection would write to: what is sent is with the kernel at once, unless ``limit_nbytes`` of
    it wait for ``take``.
    """

    def __init__(self, limit_nbytes: int | None = None, *, tls: bool = False, hurried: bool = False) -> None:
        super().__init__(("127.0.0.1", 5), tls=tls, hurried=hurried)
        self.admission = Admission(self.limits)
        self.drained: Callable[[], None] = lambda: None
        self._limit_nbytes = limit_nbytes
        self._unsent = b""
        #: Memory that was passed uncopied, and the bytes that the client has to read until it is free.
        self._lent: list[tuple[int, object]] = []
        self._releases: list[Release] = []

    @property
    def unsent_nbytes(self) -> int:
        return 0 if self._limit_nbytes is None else len(self._unsent)

    def write(self, data: bytes) -> None:
        assert data
        if not self.said:
            self._unsent += data
            self.full = self.full or self.unsent_nbytes > (self._limit_nbytes or 0)

    def write_pieces(self, pieces: Sequence[Piece], release: Release | None) -> None:
        if pieces:
            self.write(b"".join(pieces))
            lent = [one.obj if isinstance(one, memoryview) else one for one in pieces]
            self._lent += [(len(self._unsent), one) for one in lent]
        if release is not None and self.unsent_nbytes:
            self._releases.append(release)
            self.full = True
        elif release is not None:
            release()

    def take(self, nbytes: int | None = None) -> bytes:
        """What the client reads now."""
        nbytes = len(self._unsent) if nbytes is None else nbytes
        taken, self._unsent = self._unsent[:nbytes], self._unsent[nbytes:]
        self._lent = [(left - len(taken), one) for left, one in self._lent if left > len(taken)]
        if self.full and not self._unsent:
            self.full = False
            self.let_go()
            self.drained()
        return taken

    def still_sends(self, memory: object) -> bool:
        """Whether bytes of this memory wait for the client uncopied."""
        return self._limit_nbytes is not None and any(one is memory for _, one in self._lent)

    def lose(self) -> None:
        """The connection is lost, and the socket's buffer with it."""
        self._unsent, self._lent = b"", []
        self.let_go()

    def let_go(self) -> None:
        releases, self._releases = self._releases, []
        for release in releases:
            release()


class BodyReceiver:
    """Collects a body, copied as it must be. ``answer`` is called for each part; True: for the last."""

    def __init__(self, exchange: Exchange, answer: Answer | None) -> None:
        assert isinstance(exchange, Stream)
        self.exchange = exchange
        self.body = b""
        self.ended = False
        self.n_abandoned = 0
        self._answer = answer

    def receive_body(self, data: Piece, end: bool) -> None:
        assert not self.ended
        assert not self.n_abandoned
        self.body += data
        self.ended = end
        if self._answer is not None:
            self._answer(self, end)

    def abandon(self) -> None:
        self.n_abandoned += 1


class Talk:
    """One connection, and the client at its other end. ``consume``: bodies are used up as they come.
    ``handler``: accepts requests instead of the scene itself.
    """

    def __init__(
        self,
        answer: Answer | None = None,
        *,
        peer: Peer | None = None,
        way: RecordingWay | None = None,
        greet: bool = True,
        consume: bool = True,
        handler: RequestHandler | None = None,
    ) -> None:
        self.peer = peer or Peer()
        self.way = way or RecordingWay()
        self.sinks: list[BodyReceiver] = []
        self._answer = answer
        self._consume = consume
        self.http2 = Http2(self.way, handler or self.accept)
        self.way.drained = self.http2.drained
        if greet:
            self.feed(self.peer.first_settings())

    def accept(self, exchange: Exchange) -> BodyReceiver:
        self.sinks.append(BodyReceiver(exchange, self._on_part))
        return self.sinks[-1]

    def _on_part(self, sink: BodyReceiver, end: bool) -> None:
        if self._consume:
            sink.exchange.consumed(1 << 30)
        if self._answer is not None:
            self._answer(sink, end)

    def feed(self, data: bytes, cuts: Sequence[int] = ()) -> list[Frame]:
        """Bytes as the socket gives them, large ones in memory that is used again; what is sent for them."""
        edges = {0, len(data), *(min(cut, len(data)) for cut in cuts), *range(0, len(data), READ_NBYTES)}
        for start, end in itertools.pairwise(sorted(edges)):
            if end - start >= 32 << 10:
                buffer = bytearray(data[start:end])
                self.http2.feed(memoryview(buffer))
                buffer[:] = b"\xee" * len(buffer)
            else:
                self.http2.feed(data[start:end])
            while self.way.waits:
                self.way.waits = False
                self.http2.resume()
        return self.read()

    def read(self) -> list[Frame]:
        """What was sent; nothing where the way has a limit, whose ``take`` is the test's."""
        return [] if self.way.unsent_nbytes else self.peer.read(self.way.take())

    def sink(self, stream_id: int) -> BodyReceiver:
        return next(one for one in self.sinks if one.exchange.id == stream_id)

    @property
    def is_over(self) -> bool:
        """Whether the connection was aborted."""
        return bool(self.way.said)
