"""Whole answers of the HTTP endpoint, which both of its doors give: status, headers, body. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuserve.errors import Code, RequestError, ResourceExhausted
from gpuserve.front.endpoint import http_bodies, http_encoding
from gpuserve.front.endpoint.status import STATUS

#: As many digits as 64 bits have; a length of more is not parsed, and the body counted as it comes.
_MAX_LENGTH_DIGITS: Final = 20

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


def json_answer(status: int, body: bytes) -> Answer:
    """One with a body of ``http_bodies``."""
    return status, http_bodies.json_headers(body), body


def live_answer(live: bool) -> Answer:
    """Of ``/v2/health/live``; what is not so is 400, as in Triton."""
    return json_answer(200 if live else 400, http_bodies.live_body(live))


def ready_answer(ready: bool) -> Answer:
    """Of ``/v2/health/ready``."""
    return json_answer(200 if ready else 400, http_bodies.ready_body(ready))


def started_answer(started: bool) -> Answer:
    """Of ``/v2/health/startup``."""
    return json_answer(200 if started else 400, http_bodies.started_body(started))


def failure(error: RequestError, details: Mapping[str, Any] | None = None) -> Answer:
    """What a failed request is answered with; ``details`` are members beside "error"."""
    status, headers, body = json_answer(STATUS[error.code][0], http_bodies.error_body(str(error), details))
    if error.code is Code.UNAVAILABLE:
        headers.append((b"retry-after", b"1"))
    elif isinstance(error, http_encoding.UnsupportedCoding):
        headers.append(http_encoding.ACCEPT_ENCODING)
    return status, headers, body


def defect() -> Answer:
    """What a client is told of a mistake of ours."""
    return json_answer(500, http_bodies.error_body("internal error of the server"))


def too_large(nbytes: int, limit_nbytes: int) -> ResourceExhausted:
    """The error for a whole body that is over the limit."""
    return ResourceExhausted(f"a request body of {nbytes} bytes is over the limit of {limit_nbytes} bytes")


def content_length(headers: dict[bytes, bytes]) -> int | None:
    """The length that the headers tell; None where they do not."""
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS else None
