"""Whole answers of the HTTP endpoints, whose body is JSON unless their head says otherwise; and the sink of a
request that is answered whatever its body says.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import RateLimited, RequestError, ResourceExhausted
from gpuserve.front.doors.access.failures import error_to_tell
from gpuserve.front.doors.access.routes import Refusal
from gpuserve.front.doors.http import encoding
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Header, Piece
from gpuserve.front.exchange.request_rates import retry_after_s
from gpuserve.front.requests.json_values import compact
from gpuserve.front.requests.server_status import STATUS

_JSON_TYPE: Final = (b"content-type", b"application/json")
_VARY: Final = (b"vary", b"accept")
JSON_OK: Final = AnswerHead(200, (_JSON_TYPE,))


class HttpAnswer(NamedTuple):
    """A whole response: its head, and its body in bytes."""

    head: AnswerHead
    body: bytes

    def send(self, exchange: Exchange) -> None:
        exchange.answer(self.head, (self.body,), len(self.body))


def json_answer(document: Any, status: int = 200, *more: Header) -> HttpAnswer:
    """An answer with this document, or with bytes that are JSON already, and more headers."""
    body = document if isinstance(document, bytes) else compact(document).encode()
    return HttpAnswer(JSON_OK if status == 200 else _json_head(status, *more), body)


def retry_later(body: bytes, status: int, after_s: int = 1) -> HttpAnswer:
    """Return an answer that tells a client to retry after so many seconds."""
    return json_answer(body, status, (b"retry-after", b"%d" % after_s))


class HealthAnswer(HttpAnswer):
    """An answer to a question of health. The body is empty, as Triton's is, so that scripts that print the
    status behind the body read the status alone. A client whose ``Accept`` header names application/json
    gets the body of the Open Inference Protocol.
    """

    __slots__ = ()

    def send(self, exchange: Exchange) -> None:
        for name, value in exchange.head.headers:
            if name == b"accept" and _JSON_TYPE[1] in value.lower():
                super().send(exchange)
                return
        exchange.answer(_empty_head(self.head.status), (), 0)


def health_answer(what: str, so: bool) -> HealthAnswer:
    """Return the answer to whether the server is ``what``. The status of "no" is 400, as in Triton."""
    return HealthAnswer(_json_head(200 if so else 400, _VARY), compact({what: so}).encode())


def failure(error: RequestError, details: Mapping[str, Any] | None = None) -> HttpAnswer:
    """The answer to a failed request; ``details`` are members beside "error"."""
    status = STATUS[error.code][0]
    body = error_body(str(error), details)
    if status == 503:
        return retry_later(body, status)
    if isinstance(error, RateLimited):
        return retry_later(body, status, retry_after_s(error))
    if isinstance(error, encoding.UnsupportedCoding):
        return HttpAnswer(_json_head(status, encoding.ACCEPT_ENCODING), body)
    return HttpAnswer(_json_head(status), body)


def refused(refusal: Refusal) -> HttpAnswer:
    more = ((b"allow", refusal.allow.encode()),) if refusal.allow else ()
    return HttpAnswer(_json_head(refusal.status, *more), error_body(refusal.text))


def forbidden(error: RequestError) -> HttpAnswer:
    return json_answer(error_body(str(error)), 403)


def error_body(text: str, details: Mapping[str, Any] | None = None) -> bytes:
    """The body of an error; the text, and the details, are for the client."""
    return compact({"error": text, **(details or {})}).encode()


def too_large(nbytes: int, limit_nbytes: int) -> ResourceExhausted:
    """The error for a whole body that is over the limit."""
    return ResourceExhausted(f"a request body of {nbytes} bytes is over the limit of {limit_nbytes} bytes")


@functools.lru_cache(64)
def _json_head(status: int, *more: Header) -> AnswerHead:
    return AnswerHead(status, (_JSON_TYPE, *more))


@functools.lru_cache(64)
def _empty_head(status: int) -> AnswerHead:
    return AnswerHead(status, ((b"content-type", b"text/plain"), _VARY))  # the type that Triton names


class Reply:
    """Answers a request whatever its body says: at the body's end, or in the next turn of the loop. A client
    that waits for ``100 Continue`` is answered at once, so that it need not send its body.
    """

    __slots__ = ("_answer", "_exchange", "_timer")

    def __init__(self, exchange: Exchange, answer: Callable[[], HttpAnswer]) -> None:
        self._exchange = exchange
        self._answer = answer
        self._timer = asyncio.get_running_loop().call_soon(self._send)
        if exchange.head.http_version != "2" and any(name == b"expect" for name, _ in exchange.head.headers):
            self._send()

    def take(self, data: Piece, end: bool) -> None:
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
            answer = failure(error_to_tell(error, f"serving {self._exchange.head.path}"))
        answer.send(self._exchange)
