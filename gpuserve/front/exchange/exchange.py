"""What the two protocols and those who answer have in common: one request, its body, its response. Only
types. ``http1`` and ``http2`` make a ``Head`` and an ``Exchange`` of what arrives and ask an ``Accept`` for
the ``Sink`` of its body; whoever is behind the sink answers by the exchange: at once with ``answer``, or with
``start``, any number of ``send`` and ``finish``. No byte of either protocol is here.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

Header: TypeAlias = tuple[bytes, bytes]
Piece: TypeAlias = bytes | memoryview
#: Called once when memory that was to be sent is not needed any more.
Release: TypeAlias = Callable[[], None]

TE: Final = (b"te", b"trailers")
#: The content types of gRPC calls with messages of protobuf; of several types the first one counts.
_GRPC: Final = frozenset({b"application/grpc", b"application/grpc+proto"})
_TIMEOUT_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class Head:
    """The head of a request. Equal bytes may share one: nobody changes it.

    ``headers`` have names in lower case, in the order in which they came; over HTTP/2 without those that
    begin with a colon, and with ``host``. ``target`` is the path and the query as they were sent, ``path``
    without percent-encoding, but for calls of gRPC (``is_grpc``), which know none. ``content_length`` is None
    where it is not told; ``trailers``: the client takes trailers. In ``memo``, ``forwarded`` and ``payer``
    the handler of a request keeps what it has worked out of the head.
    """

    __slots__ = (
        "content_length",
        "forwarded",
        "headers",
        "http_version",
        "is_grpc",
        "memo",
        "method",
        "path",
        "payer",
        "query",
        "raw_path",
        "scheme",
        "target",
        "trailers",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: Sequence[Header],
        http_version: str,
        content_length: int | None,
        scheme: str = "http",
    ) -> None:
        self.method = method
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
        #: What its headers are as parameters, None until somebody asks.
        self.forwarded: dict[str, str] | None = None
        #: Who is counted under the rate limit, None until a request with this head is counted.
        self.payer: int | None = None


def grpc_timeout_s(headers: Iterable[Header]) -> float | None:
    """The time limit of a call; one that does not parse is none, as in grpc's own servers."""
    text = next((value.decode("latin-1") for name, value in headers if name == b"grpc-timeout"), "")
    unit, digits = _TIMEOUT_UNITS.get(text[-1:]), text[:-1]
    if unit is None or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        return None
    return int(digits) * unit


class AnswerHead:
    """What goes around the body of a whole response: status, headers, trailers. Make it once and keep it
    where it is the same for many responses: it is encoded only once, by HTTP/1 in ``text``, by HTTP/2 for
    each connection. Names are in lower case, and ``content-length`` is not among them: where there are no
    trailers, the exchange adds it.
    """

    __slots__ = ("headers", "status", "text", "trailers")

    def __init__(self, status: int, headers: Iterable[Header], trailers: Iterable[Header] = ()) -> None:
        self.status = status
        self.headers = tuple(headers)
        self.trailers = tuple(trailers)
        self.text = b""


class Options(Protocol):
    """What a socket says of itself."""

    def getsockopt(self, level: int, option: int, nbytes: int, /) -> bytes: ...


class Ends(NamedTuple):
    """The addresses of a connection as (host, port). On a unix socket ``client`` is None. ``source``: whose
    connections are counted together, "" where that is not known. ``user`` is the client's on this machine,
    where the socket is another process's, which has asked.
    """

    client: tuple[str, int] | None
    server: tuple[str, int | None]
    tls: bool
    socket: Options | None = None
    source: str | bytes = ""
    user: int | None = None


class Sink(Protocol):
    """Takes the body of one request. Called by the connection, in the loop; must not raise."""

    def take(self, data: Piece, end: bool) -> None:
        """The next part of the body, possibly empty; ``end``: the last. A view is valid in the call only."""

    def abandon(self) -> None:
        """Nothing more comes, and what is sent is dropped: the client gave up, or has its whole response."""


class Exchange(Protocol):
    """One request at its connection, to be answered. After the client has gone, calls do nothing."""

    head: Head
    ends: Ends

    @property
    def started(self) -> bool:
        """Whether the response has begun: its status cannot be another any more."""

    @property
    def ended(self) -> bool:
        """Whether nothing more can be sent: the response is complete, or the client is gone."""

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        """The whole response, whose body is these pieces, ``nbytes`` altogether. They are not copied where
        they are large: ``release`` is called, once, when their memory is not needed any more, also where
        nobody waits for the response.
        """

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        """Begin the response; ``end``: it has no body."""

    def send(self, data: bytes, end: bool = False) -> None:
        """The next part of the body."""

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        """End the response after its body. HTTP/1.1 drops the trailers."""

    def drop_unsent(self) -> None:
        """Drop what of the body still waits for the client; ``finish`` then tells the end at once. What is on
        its way is not taken back, and over HTTP/1.1 nothing is.
        """

    def reset(self) -> None:
        """Break the response off: its end cannot be told any more. A client sees it as an error."""

    def consumed(self, nbytes: int) -> None:
        """So much of what the sink took is used up: the client may send as much again."""

    async def room(self) -> None:
        """Wait until there is not too much to be sent; ConnectionResetError: the client is gone."""


#: Takes a request whose head is complete and gives the sink of its body. Must not raise.
Accept: TypeAlias = Callable[[Exchange], Sink]


class Spoken(Protocol):
    """A protocol on one connection. Called in the loop; none of these raises."""

    @property
    def sent(self) -> tuple[int, int]:
        """How many bytes of answers its client has been sent so far, and how many wait until it reads."""

    @property
    def unanswered(self) -> Sequence[str]:
        """The paths of the requests that are not answered yet."""

    def feed(self, data: Piece) -> None:
        """What has arrived. A view is valid in the call only."""

    def go_on(self) -> None:
        """Take up what the connection put off to another turn, maybe after it was lost."""

    def drained(self) -> None:
        """The connection is not ``full`` any more."""

    def lost(self) -> None:
        """The connection is gone: every sink is abandoned."""

    def announce(self) -> None:
        """Have the client told, once, to send no more requests; those before it has heard are served."""

    @property
    def aware(self) -> bool:
        """Whether the client has heard of it, or will by the answer that it waits for."""

    def shut_down(self) -> None:
        """Take no new request, and close when all are answered. Called until it is closed."""

    def check(self, now: float) -> None:
        """Called about once a second with the loop's time: close what takes too long."""
