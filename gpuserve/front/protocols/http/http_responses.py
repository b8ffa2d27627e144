"""HTTP responses: codings, JSON bodies, errors, endpoint functions. Pure, but for ``ImmediateReceiver``."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.core.errors import RateLimited, RequestError, ResourceExhausted, Unimplemented
from gpuserve.front.net.async_requests import AsyncRequest
from gpuserve.front.net.exchange import AnswerHead, Exchange, Header, Piece
from gpuserve.front.net.request_rate_limiter import retry_after_s
from gpuserve.front.protocols.access.body_decoding import WINDOW_BITS, client_error
from gpuserve.front.protocols.access.endpoints import Endpoint, Route, RouteError
from gpuserve.front.requests.json_values import compact
from gpuserve.front.requests.server_status import STATUS

#: Sent with the refusal of a coding, so that the client learns what it may use.
ACCEPT_ENCODING: Final = (b"accept-encoding", b"gzip, deflate")
IDENTITY: Final = "identity"
#: The fastest level: tensors are mostly floats, where more work gains next to nothing.
_LEVEL: Final = 1


class UnsupportedCoding(Unimplemented):
    """A request body in a coding that this server does not read."""


def request_coding(content_encoding: str | None) -> str:
    """Return "identity", "gzip" or "deflate". Raise UnsupportedCoding for any other coding."""
    coding = (content_encoding or IDENTITY).strip().lower().removeprefix("x-") or IDENTITY
    if coding != IDENTITY and coding not in WINDOW_BITS:
        raise UnsupportedCoding("Unsupported compression type")
    return coding


def negotiate_coding(accept_encoding: str | None) -> str:
    """Return the known coding with the highest q-value in the header, the first of equals."""
    if not accept_encoding:
        return IDENTITY
    best, best_quality = IDENTITY, 0.0
    for item in accept_encoding.lower().split(","):
        coding, _, parameters = item.partition(";")
        coding, quality = coding.strip(), _quality(parameters)
        known = coding == IDENTITY or coding in WINDOW_BITS
        if known and quality > best_quality:
            best, best_quality = coding, quality
    return best


def compress_response(
    coding: str, head: AnswerHead, pieces: Iterable[bytes | memoryview]
) -> tuple[AnswerHead, list[bytes]]:
    """Return head and body of a response in the negotiated coding ("gzip" or "deflate")."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, WINDOW_BITS[coding])
    out = [compressor.compress(piece) for piece in pieces]
    out = [piece for piece in (*out, compressor.flush()) if piece]
    coded = ((b"content-encoding", coding.encode()), (b"vary", b"accept-encoding"))
    return AnswerHead(head.status, (*head.headers, *coded)), out


def _quality(parameters: str) -> float:
    """Return the q-value, 1 if there is none; an invalid value counts as refused."""
    key, _, value = parameters.partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        quality = float(value)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0


_JSON_TYPE: Final = (b"content-type", b"application/json")
#: The type of empty bodies, which Triton names.
_EMPTY_TYPE: Final = (b"content-type", b"text/plain")
_VARY: Final = (b"vary", b"accept")
JSON_OK: Final = AnswerHead(200, (_JSON_TYPE,))


class HttpAnswer(NamedTuple):
    """A complete response: its head, and its body in bytes."""

    head: AnswerHead
    body: bytes

    def send(self, exchange: Exchange) -> None:
        exchange.answer(self.head, (self.body,), len(self.body))


def json_answer(document: Any, status: int = 200, *more: Header) -> HttpAnswer:
    """Return an answer with a document, or with bytes that are JSON already, and additional headers."""
    body = document if isinstance(document, bytes) else compact(document).encode()
    return HttpAnswer(JSON_OK if status == 200 else _head(status, _JSON_TYPE, *more), body)


def retry_later(body: bytes, status: int, after_s: int = 1) -> HttpAnswer:
    """Return an answer that asks the client to retry after so many seconds."""
    return json_answer(body, status, (b"retry-after", b"%d" % after_s))


class HealthAnswer(HttpAnswer):
    """An answer to a health request. The body is empty, as Triton's is, so that scripts read the status
    alone; a client that accepts application/json gets the body of the Open Inference Protocol.
    """

    __slots__ = ()

    def send(self, exchange: Exchange) -> None:
        for name, value in exchange.head.headers:
            if name == b"accept" and _JSON_TYPE[1] in value.lower():
                super().send(exchange)
                return
        exchange.answer(_head(self.head.status, _EMPTY_TYPE, _VARY), (), 0)


def health_answer(what: str, so: bool) -> HealthAnswer:
    """Return the answer to whether the server is ``what``. The status of "no" is 400, as in Triton."""
    return HealthAnswer(_head(200 if so else 400, _JSON_TYPE, _VARY), compact({what: so}).encode())


def error_answer(error: RequestError, details: Mapping[str, Any] | None = None) -> HttpAnswer:
    """Return the answer to a failed request; ``details`` are members beside "error"."""
    status = STATUS[error.code][0]
    body = error_body(str(error), details)
    if status == 503:
        return retry_later(body, status)
    if isinstance(error, RateLimited):
        return retry_later(body, status, retry_after_s(error))
    if isinstance(error, UnsupportedCoding):
        return HttpAnswer(_head(status, _JSON_TYPE, ACCEPT_ENCODING), body)
    return HttpAnswer(_head(status, _JSON_TYPE), body)


def route_error_answer(refusal: RouteError) -> HttpAnswer:
    more = ((b"allow", refusal.allow.encode()),) if refusal.allow else ()
    return HttpAnswer(_head(refusal.status, _JSON_TYPE, *more), error_body(refusal.text))


def forbidden_answer(error: RequestError) -> HttpAnswer:
    return json_answer(error_body(str(error)), 403)


def error_body(text: str, details: Mapping[str, Any] | None = None) -> bytes:
    """Return the body of an error, with a text and details for the client."""
    return compact({"error": text, **(details or {})}).encode()


def body_too_large(nbytes: int, limit_nbytes: int) -> ResourceExhausted:
    """Return the error for a body over the limit."""
    return ResourceExhausted(
        f"request size of {nbytes} bytes exceeds the maximum allowed input size of {limit_nbytes} bytes. "
        "Use --max-request-nbytes to increase the limit."
    )


@functools.lru_cache(64)
def _head(status: int, *headers: Header) -> AnswerHead:
    return AnswerHead(status, headers)


class ImmediateReceiver:
    """A body receiver that answers whatever the body says: at its end, or in the next iteration of the loop.
    A client that waits for ``100 Continue`` is answered at once, so that it need not send its body.
    """

    __slots__ = ("_answer", "_exchange", "_timer")

    def __init__(self, exchange: Exchange, answer: Callable[[], HttpAnswer]) -> None:
        self._exchange = exchange
        self._answer = answer
        self._timer = asyncio.get_running_loop().call_soon(self._send)
        if exchange.head.http_version != "2" and any(name == b"expect" for name, _ in exchange.head.headers):
            self._send()

    def receive_body(self, data: Piece, end: bool) -> None:
        self._exchange.consumed(len(data))
        if end:
            self._send()

    def abandon(self) -> None:
        self._timer.cancel()

    def _send(self) -> None:
        self._timer.cancel()
        if self._exchange.started:
            return
        try:
            answer = self._answer()
        except Exception as error:
            answer = error_answer(client_error(error, f"serving {self._exchange.head.path}"))
        answer.send(self._exchange)


#: An endpoint that answers at once, whatever the body says. Raises ``RequestError``.
ImmediateEndpoint: TypeAlias = Callable[[Route], HttpAnswer]
#: An endpoint that reads the body or waits. Returns None if it has answered. Raises ``RequestError``.
AsyncEndpoint: TypeAlias = Callable[[Route, AsyncRequest], Awaitable[HttpAnswer | None]]


class ErrorFormat(NamedTuple):
    """The makers of answers to a failed, an unroutable and a forbidden request."""

    failure: Callable[[RequestError], HttpAnswer]
    refused: Callable[[RouteError], HttpAnswer]
    forbidden: Callable[[RequestError], HttpAnswer]


class EndpointFamily(NamedTuple):
    """The endpoints below one prefix, with errors in a format of their own."""

    prefix: bytes
    errors: ErrorFormat
    immediate: Mapping[Endpoint, ImmediateEndpoint]
    awaiting: Mapping[Endpoint, AsyncEndpoint]


#: The error format of the v2 protocol.
V2_ERRORS: Final = ErrorFormat(error_answer, route_error_answer, forbidden_answer)
NO_FAMILY: Final = EndpointFamily(b"", V2_ERRORS, {}, {})
