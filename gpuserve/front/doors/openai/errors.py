"""What went wrong, in the form and with the statuses of OpenAI's API. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

from gpuserve.core.errors import Code, QueueFull, RateLimited, RequestError
from gpuserve.front.doors.access.routes import Refusal
from gpuserve.front.doors.http.answers import HttpAnswer, json_answer, retry_later
from gpuserve.front.exchange.request_rates import retry_after_s
from gpuserve.front.requests.json_values import compact
from gpuserve.front.requests.server_status import STATUS

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_PATHS: Final = "/v1/models, /v1/models/NAME, /v1/chat/completions, /v1/completions or /v1/embeddings"
#: A text that is about a member of the body begins with its name: "messages.0.role: …".
_PARAM: Final = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*): ")
#: The type and the code of each error, where they are not those of a server's.
_KINDS: Final = {
    Code.INVALID_ARGUMENT: (_INVALID, None),
    Code.NOT_FOUND: (_INVALID, "model_not_found"),
    Code.RESOURCE_EXHAUSTED: (_INVALID, "request_too_large"),
    Code.UNIMPLEMENTED: (_INVALID, None),
    Code.DEADLINE_EXCEEDED: ("timeout", "timeout"),
    Code.UNAVAILABLE: (_SERVER, "unavailable"),
    Code.NO_MEMORY: (_SERVER, "unavailable"),
}


def failure(error: RequestError) -> HttpAnswer:
    if isinstance(error, QueueFull):
        return retry_later(error_body(error), 429)
    if isinstance(error, RateLimited):
        return retry_later(error_body(error), 429, retry_after_s(error))
    status = STATUS[error.code][0]
    return retry_later(error_body(error), 503) if status == 503 else json_answer(error_body(error), status)


def refused(refusal: Refusal) -> HttpAnswer:
    text = f"{refusal.text}: expected {_PATHS}"
    more = ((b"allow", refusal.allow.encode()),) if refusal.allow else ()
    return json_answer(_body(text, _INVALID, None, "unknown_url"), refusal.status, *more)


def forbidden(error: RequestError) -> HttpAnswer:
    return json_answer(_body(str(error), _INVALID, None, "invalid_api_key"), 401)


def error_body(error: RequestError) -> bytes:
    text = str(error)
    if isinstance(error, QueueFull | RateLimited):
        return _body(text, "requests", None, "rate_limit_exceeded")
    kind, code = _KINDS.get(error.code, (_SERVER, None))
    if error.code is Code.NOT_FOUND:
        return _body(text, kind, "model", code)
    found = _PARAM.match(text) if error.code is Code.INVALID_ARGUMENT else None
    return _body(text, kind, found and found[1], code)


def _body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return compact({"error": error}).encode()
