"""Access logging: an ``Exchange`` and a ``BodyReceiver`` around those of a request, if there is a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpuserve.front.net import exchange as net
from gpuserve.front.net.exchange import BodyReceiver, Exchange, Header, RequestHandler, WrappedExchange
from gpuserve.front.observability.access_log import REQUEST_ID, AccessLog
from gpuserve.front.protocols.access.authorization import address_of

_GRPC_STATUS: Final = b"grpc-status"


def with_access_log(log: AccessLog | None, accept: RequestHandler) -> RequestHandler:
    """Return a request handler that also writes the access log, or the same handler if there is none."""
    if log is None:
        return accept

    def logged_accept(exchange: Exchange) -> BodyReceiver:
        logged = LoggedExchange(exchange, log)
        return LoggedReceiver(logged, accept(logged))

    return logged_accept


class LoggedExchange(WrappedExchange):
    """An exchange that counts bytes and logs a line at the end of the response. Handlers add ``notes``."""

    __slots__ = (
        "_grpc_status", "_is_written", "_log", "_sent_nbytes", "_started_at", "_status", "notes",
        "received_nbytes",
    )  # fmt: skip

    def __init__(self, inner: Exchange, log: AccessLog, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._started_at = clock()
        self._log = log
        self.notes = log.notes(next((value for name, value in inner.head.headers if name == REQUEST_ID), b""))
        self.received_nbytes = 0
        self._sent_nbytes = 0
        self._status: int | None = None
        self._grpc_status: int | None = None
        self._is_written = False

    def answer(
        self, head: net.AnswerHead, body: Sequence[net.Piece], nbytes: int, release: net.Release | None = None
    ) -> None:
        self._read_grpc_status(head.headers, head.trailers)
        self._status = head.status
        self._sent_nbytes += nbytes
        named = net.AnswerHead(head.status, (*head.headers, self._id_header()), head.trailers)
        self._inner.answer(named, body, nbytes, release)
        self.write_line()

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        headers = tuple(headers)
        self._read_grpc_status(headers)
        self._status = status
        self._inner.start(status, (*headers, self._id_header()), end)
        if end:
            self.write_line()

    def send(self, data: bytes, end: bool = False) -> None:
        self._sent_nbytes += len(data)
        self._inner.send(data, end)
        if end:
            self.write_line()

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        trailers = tuple(trailers)
        self._read_grpc_status(trailers)
        self._inner.finish(trailers)
        self.write_line()

    def reset(self) -> None:
        self.write_line(aborted=True)
        self._inner.reset()

    def write_line(self, *, aborted: bool = False) -> None:
        """Write the log line, once."""
        if not self._is_written:
            self._is_written = True
            self._log.ended(self._fields(aborted=aborted), self.notes)

    def _id_header(self) -> Header:
        return REQUEST_ID, self.notes.id.encode()

    def _read_grpc_status(self, *parts: Iterable[Header]) -> None:
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
            "duration_s": round(time.monotonic() - self._started_at, 6),
            "client": address_of(self.endpoints),
        }


class LoggedReceiver:
    """A body receiver that counts the bytes of the body and notices an aborted request."""

    __slots__ = ("_exchange", "_receiver", "is_stream")

    def __init__(self, exchange: LoggedExchange, receiver: BodyReceiver) -> None:
        self._exchange = exchange
        self._receiver = receiver
        self.is_stream: bool = getattr(receiver, "is_stream", False)

    def receive_body(self, data: net.Piece, end: bool) -> None:
        self._exchange.received_nbytes += len(data)
        self._receiver.receive_body(data, end)

    def abandon(self) -> None:
        self._exchange.write_line(aborted=True)
        self._receiver.abandon()
