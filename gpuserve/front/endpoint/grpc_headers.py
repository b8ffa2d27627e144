"""The headers and trailers of gRPC calls: what a client's say, and what ours are. Pure."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Final

from gpuserve.errors import Code, RequestError, Stopping
from gpuserve.front.endpoint.grpc_framing import ACCEPTED_ENCODINGS
from gpuserve.front.endpoint.status import STATUS

CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
ACCEPT_ENCODING: Final = (b"grpc-accept-encoding", ACCEPTED_ENCODINGS.replace(" ", "").encode())
#: Before messages, and after them.
OK_HEADERS: Final = [CONTENT_TYPE, ACCEPT_ENCODING]
OK_TRAILERS: Final = [(b"grpc-status", b"0")]
#: Has clients that try again wait a moment: by then they know which servers are left. (gRPC proposal A6)
RETRY_PUSHBACK: Final = ("grpc-retry-pushback-ms", "100")
_TIMEOUT_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_MESSAGE_CHARS: Final = 8192


def encoding_of(headers: Mapping[bytes, bytes]) -> str:
    """The compression of a call's messages; "" for identity."""
    encoding = headers.get(b"grpc-encoding", b"identity")
    return "" if encoding == b"identity" else encoding.decode("latin-1")


def timeout_s_of(headers: Mapping[bytes, bytes]) -> float | None:
    """The time limit of a call; one that does not parse is none, as in grpc's own servers."""
    value = headers.get(b"grpc-timeout")
    if value is None:
        return None
    text = value.decode("latin-1")
    unit = _TIMEOUT_UNITS.get(text[-1:])
    digits = text[:-1]
    if unit is None or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        return None
    return int(digits) * unit


def refusal_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Trailers-Only: the status where no message comes before it."""
    headers = [CONTENT_TYPE, *status_trailers(error)]
    if error.code is Code.UNIMPLEMENTED:
        headers.append(ACCEPT_ENCODING)
    return headers


def status_trailers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """The status after messages."""
    trailers = [
        (b"grpc-status", str(STATUS[error.code][1]).encode()),
        (b"grpc-message", grpc_message(str(error))),
    ]
    if isinstance(error, Stopping):
        trailers.append((RETRY_PUSHBACK[0].encode(), RETRY_PUSHBACK[1].encode()))
    return trailers


def grpc_message(text: str) -> bytes:
    """An error text as the ``grpc-message`` header: percent-encoded UTF-8, printable ASCII as it is."""
    return urllib.parse.quote(text[:_MAX_MESSAGE_CHARS], safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}").encode()
