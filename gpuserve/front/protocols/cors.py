"""Cross-origin requests of browser pages (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol): pages of
listed origins may read answers. An ``Exchange`` around that of a request adds the headers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Final

from gpuserve.front.net.exchange import (
    AnswerHead,
    BodyReceiver,
    Exchange,
    Header,
    Piece,
    Release,
    RequestHandler,
    WrappedExchange,
)
from gpuserve.front.protocols.http.http_responses import HttpAnswer, ImmediateReceiver

#: In ``cors_origins``: pages of any origin.
ANY_ORIGIN: Final = "*"
_VARY: Final = (b"vary", b"origin")
#: The headers of answers that pages may read, besides those that browsers always show.
_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"inference-header-content-length, x-request-id, retry-after",
)
_METHODS: Final = (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS")
#: Seconds for which a browser remembers a preflight.
_MAX_AGE: Final = (b"access-control-max-age", b"600")


def with_cors(origins: Collection[str], accept: RequestHandler) -> RequestHandler:
    """Return a request handler whose answers pages of these origins may read, or the same handler if there
    are no origins. Preflights are answered here, because they carry no token.
    """
    if not origins:
        return accept
    allowed = frozenset(one.encode() for one in origins)

    def cors_accept(exchange: Exchange) -> BodyReceiver:
        headers = dict(exchange.head.headers)
        origin = headers.get(b"origin")
        if origin is None or not (origin.lower() in allowed or ANY_ORIGIN in origins):
            return accept(exchange)
        allow = (b"access-control-allow-origin", origin)
        if exchange.head.method == "OPTIONS" and b"access-control-request-method" in headers:
            asked = headers.get(b"access-control-request-headers", b"content-type")
            more = (allow, _VARY, _METHODS, (b"access-control-allow-headers", asked), _MAX_AGE)
            return ImmediateReceiver(exchange, partial(HttpAnswer, AnswerHead(204, more), b""))
        return accept(_CorsExchange(exchange, (allow, _VARY, _EXPOSED)))

    return cors_accept


class _CorsExchange(WrappedExchange):
    """An exchange whose answer has more headers."""

    __slots__ = ("_more",)

    def __init__(self, inner: Exchange, more: tuple[Header, ...]) -> None:
        super().__init__(inner)
        self._more = more

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        named = AnswerHead(head.status, (*head.headers, *self._more), head.trailers)
        self._inner.answer(named, body, nbytes, release)

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        self._inner.start(status, (*headers, *self._more), end)
