"""Requests whose ends are in the access log: an ``Exchange`` and a ``Sink`` around those of the connection
and of the door. They are there only where there is an access log; no other request meets any of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpuserve.front.doors.access.peers import address_of
from gpuserve.front.exchange.exchange import (
    Accept,
    AnswerHead,
    Exchange,
    Header,
    Piece,
    Release,
    Sink,
)
from gpuserve.front.observability.access_log import REQUEST_ID, AccessLog

_GRPC_STATUS: Final = b"grpc-status"


def access_logged(log: AccessLog | None, accept: Accept) -> Accept:
    """The same door with an access log, where there is to be one."""
    return accept if log is None else _LoggedDoor(accept, log).accept


class _LoggedDoor:
    def __init__(self, accept: Accept, log: AccessLog) -> None:
        self._accept = accept
        self._log = log

    def accept(self, exchange: Exchange) -> Sink:
        logged = LoggedExchange(exchange, self._log)
        return LoggedSink(logged, self._accept(logged))


class LoggedExchange:
    """An exchange that counts and tells the log how it ended. ``notes`` are for whoever runs its request."""

    __slots__ = (
        "_began_at", "_grpc_status", "_inner", "_is_through", "_log", "_sent_nbytes", "_status", "ends",
        "head", "notes", "received_nbytes",
    )  # fmt: skip

    def __init__(self, inner: Exchange, log: AccessLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._began_at = clock()
        self._inner = inner
        self._log = log
        self.head = inner.head
        self.ends = inner.ends
        self.notes = log.notes(next((value for name, value in inner.head.headers if name == REQUEST_ID), b""))
        self.received_nbytes = 0
        self._sent_nbytes = 0
        self._status: int | None = None
        self._grpc_status: int | None = None
        self._is_through = False

    @property
    def started(self) -> bool:
        return self._inner.started

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        self._look_at(head.headers, head.trailers)
        self._status = head.status
        self._sent_nbytes += nbytes
        named = AnswerHead(head.status, (*head.headers, self._id_header()), head.trailers)
        self._inner.answer(named, body, nbytes, release)
        self.through()

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        headers = tuple(headers)
        self._look_at(headers)
        self._status = status
        self._inner.start(status, (*headers, self._id_header()), end)
        if end:
            self.through()

    def send(self, data: bytes, end: bool = False) -> None:
        self._sent_nbytes += len(data)
        self._inner.send(data, end)
        if end:
            self.through()

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        trailers = tuple(trailers)
        self._look_at(trailers)
        self._inner.finish(trailers)
        self.through()

    def drop_unsent(self) -> None:
        self._inner.drop_unsent()

    def reset(self) -> None:
        self.through(aborted=True)
        self._inner.reset()

    def consumed(self, nbytes: int) -> None:
        self._inner.consumed(nbytes)

    async def room(self) -> None:
        await self._inner.room()

    def through(self, *, aborted: bool = False) -> None:
        """Write its line, unless it has one."""
        if not self._is_through:
            self._is_through = True
            self._log.ended(self._fields(aborted=aborted), self.notes)

    def _id_header(self) -> Header:
        return REQUEST_ID, self.notes.id.encode()

    def _look_at(self, *parts: Iterable[Header]) -> None:
        if not self.head.is_grpc:
            return
        for headers in parts:
            for name, value in headers:
                if name == _GRPC_STATUS:
                    self._grpc_status = int(value)

    def _fields(self, *, aborted: bool) -> dict[str, Any]:
        head = self.head
        found: dict[str, Any] = {
            "protocol": "grpc" if head.is_grpc else f"http/{head.http_version}",
            "method": "rpc" if head.is_grpc else head.method,
            "path": head.raw_path.decode("latin-1"),
        }
        statuses = {"status": self._status, "grpc_status": self._grpc_status}
        found |= {name: value for name, value in statuses.items() if value is not None}
        if aborted:
            found["aborted"] = True
        return found | {
            "received_nbytes": self.received_nbytes,
            "sent_nbytes": 0 if head.method == "HEAD" else self._sent_nbytes,
            "duration_s": round(time.monotonic() - self._began_at, 6),
            "client": address_of(self.ends),
        }


class LoggedSink:
    """The sink of a door, whose parts are counted, and whose client may leave."""

    __slots__ = ("_exchange", "_sink", "is_stream")

    def __init__(self, exchange: LoggedExchange, sink: Sink) -> None:
        self._exchange = exchange
        self._sink = sink
        self.is_stream: bool = getattr(sink, "is_stream", False)

    def take(self, data: Piece, end: bool) -> None:
        self._exchange.received_nbytes += len(data)
        self._sink.take(data, end)

    def abandon(self) -> None:
        self._exchange.through(aborted=True)
        self._sink.abandon()
