"""The interface between protocols and request handlers: one request, its body, its response. Only types.

HTTP/1 and HTTP/2 make a ``Head`` and an ``Exchange`` of a request and call a ``RequestHandler``, which
returns the ``BodyReceiver`` for the request body. The receiver responds by the exchange: with ``answer``, or
with ``start``, any number of ``send``, and ``finish``.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

Header: TypeAlias = tuple[bytes, bytes]
Piece: TypeAlias = bytes | memoryview
#: A callback for when memory that was to be sent is no longer needed. Called once.
Release: TypeAlias = Callable[[], None]
#: The future that a coroutine awaits until ``wake``, if it waits.
Waiter: TypeAlias = "asyncio.Future[None] | None"

TE: Final = (b"te", b"trailers")
#: The content types of gRPC calls with protobuf messages; the first content-type header counts.
_GRPC: Final = frozenset({b"application/grpc", b"application/grpc+proto"})
_TIMEOUT_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def wake(waiter: Waiter) -> None:
    """Let a coroutine continue, if it waits."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Head:
    """The head of a request. Requests with equal bytes may share a head, which nobody changes.

    ``headers`` have lower-case names in the order of arrival; for HTTP/2 without pseudo-headers and with
    ``host``. ``spelled`` are pairs of a lower-case name and the name as sent, if they differ. ``target`` is
    the path and query as sent. ``path`` is percent-decoded, except for gRPC (``is_grpc``), which has no
    percent-encoding. ``content_length`` is None if not sent; ``trailers`` is whether the client accepts
    trailers. Handlers cache results derived from the head in ``memo``, ``forwarded`` and ``payer``.
    """

    __slots__ = (
        "content_length", "forwarded", "headers", "http_version", "is_grpc", "memo", "method", "path",
        "payer", "query", "raw_path", "scheme", "spelled", "target", "trailers",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: Sequence[Header],
        http_version: str,
        content_length: int | None,
        scheme: str = "http",
        spelled: tuple[Header, ...] = (),
    ) -> None:
        self.method = method
        self.spelled = spelled
        self.target = target
        self.raw_path, _, self.query = target.partition(b"?")
        self.headers = headers
        self.http_version = http_version
        self.content_length = content_length
        self.scheme = scheme
        self.trailers = http_version == "2" and TE in headers
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        self.is_grpc = method == "POST" and kind.partition(b";")[0].strip() in _GRPC
        path = self.raw_path.decode("latin-1")
        self.path = path if self.is_grpc else urllib.parse.unquote(path)
        self.memo: Any = None
        #: Request parameters made of forwarded headers; None until computed.
        self.forwarded: dict[str, str] | None = None
        #: The client key for the rate limit; None until computed.
        self.payer: int | None = None


def grpc_timeout_s(headers: Iterable[Header]) -> float | None:
    """Return a gRPC call's time limit in seconds. A malformed limit is ignored, as in gRPC's own servers."""
    text = next((value.decode("latin-1") for name, value in headers if name == b"grpc-timeout"), "")
    unit, digits = _TIMEOUT_UNITS.get(text[-1:]), text[:-1]
    if unit is None or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        return None
    return int(digits) * unit


class AnswerHead:
    """The head and trailers of a complete response. Reuse one object for equal responses: HTTP/1 encodes it
    once, in ``text``, and HTTP/2 once for each connection. Names are in lower case. ``content-length`` is not
    among the headers: the exchange adds the header if there are no trailers.
    """

    __slots__ = ("headers", "status", "text", "trailers")

    def __init__(self, status: int, headers: Iterable[Header], trailers: Iterable[Header] = ()) -> None:
        self.status = status
        self.headers = tuple(headers)
        self.trailers = tuple(trailers)
        self.text = b""


class SocketOptions(Protocol):
    """The part of a socket that answers questions about its peer."""

    def getsockopt(self, level: int, option: int, nbytes: int, /) -> bytes: ...


class ConnectionEndpoints(NamedTuple):
    """The addresses of a connection as (host, port). ``client`` is None on a unix socket. ``source`` is the
    key under which connections are counted together, "" if unknown. ``user`` is the client's uid on this
    machine if another process has the socket and has looked the uid up.
    """

    client: tuple[str, int] | None
    server: tuple[str, int | None]
    tls: bool
    socket: SocketOptions | None = None
    source: str | bytes = ""
    user: int | None = None


class BodyReceiver(Protocol):
    """The receiver of one request body. Called by the connection on the event loop; must not raise."""

    def receive_body(self, data: Piece, end: bool) -> None:
        """Receive the next part of the body, perhaps empty. A memoryview is valid during the call only."""

    def abandon(self) -> None:
        """Stop: nothing more arrives, and output is dropped. The client left, or the response is complete."""


class Exchange(Protocol):
    """One request at its connection, to be answered. After the client has gone, calls do nothing."""

    head: Head
    endpoints: ConnectionEndpoints

    @property
    def started(self) -> bool:
        """True if the response has begun, so that its status is final."""

    @property
    def ended(self) -> bool:
        """True if nothing more can be sent: the response is complete, or the client is gone."""

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        """Send a complete response of ``nbytes``. Large pieces are not copied: ``release`` is called once
        their memory is no longer needed, also if nobody waits for the response.
        """

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        """Begin the response; ``end``: the response has no body."""

    def send(self, data: bytes, end: bool = False) -> None:
        """Send the next part of the body."""

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        """End the response after its body. HTTP/1.1 drops the trailers."""

    def drop_unsent(self) -> None:
        """Drop the body that waits for the client, but for data in flight. HTTP/1.1 drops nothing."""

    def reset(self) -> None:
        """Abort the response. The client sees an error."""

    def consumed(self, nbytes: int) -> None:
        """Allow the client to send ``nbytes`` more: this much of the received body is processed."""

    async def room(self) -> None:
        """Wait until little enough output is unsent. Raise ConnectionResetError if the client is gone."""


class WrappedExchange:
    """An exchange around another one, for subclasses that change a part of it."""

    __slots__ = ("_inner", "endpoints", "head")

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner
        self.head = inner.head
        self.endpoints = inner.endpoints

    @property
    def started(self) -> bool:
        return self._inner.started

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        self._inner.answer(head, body, nbytes, release)

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        self._inner.start(status, headers, end)

    def send(self, data: bytes, end: bool = False) -> None:
        self._inner.send(data, end)

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        self._inner.finish(trailers)

    def drop_unsent(self) -> None:
        self._inner.drop_unsent()

    def reset(self) -> None:
        self._inner.reset()

    def consumed(self, nbytes: int) -> None:
        self._inner.consumed(nbytes)

    async def room(self) -> None:
        await self._inner.room()


#: Handles a request whose head is complete and returns the receiver of its body. Must not raise.
RequestHandler: TypeAlias = Callable[[Exchange], BodyReceiver]


class ConnectionProtocol(Protocol):
    """A protocol on one connection. Called on the event loop; must not raise."""

    @property
    def sent(self) -> tuple[int, int]:
        """The response bytes sent so far, and the response bytes that wait until the client reads."""

    @property
    def unanswered(self) -> Sequence[str]:
        """The paths of the requests that are not answered yet."""

    def feed(self, data: Piece) -> None:
        """Process received data. A memoryview is valid during the call only."""

    def resume(self) -> None:
        """Continue work that the connection deferred; possibly after the connection was lost."""

    def drained(self) -> None:
        """Continue sending: the connection is no longer ``full``."""

    def lost(self) -> None:
        """Abandon every request: the connection is gone."""

    def announce(self) -> None:
        """Ask the client, once, to send no more requests. Requests in flight are served."""

    @property
    def aware(self) -> bool:
        """True if the client has read the announcement, or will with the response that it waits for."""

    def shut_down(self) -> None:
        """Refuse new requests, and close when all are answered. Called repeatedly until closed."""

    def check(self, now: float) -> None:
        """End overdue work. Called about once a second with the loop's time."""
