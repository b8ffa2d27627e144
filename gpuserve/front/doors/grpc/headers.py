"""The headers and trailers of gRPC calls: what a client's say, what ours are, and how a call is ended by a
status. No message is here.
"""

from __future__ import annotations

import math
import time
import urllib.parse
from collections.abc import Iterable
from typing import Final, NamedTuple

from gpuserve.core.errors import Code, DeadlineExceeded, RateLimited, RequestError, Stopping
from gpuserve.front.doors.grpc.framing import ACCEPTED_ENCODINGS, IDENTITY
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Head, grpc_timeout_s
from gpuserve.front.exchange.request_rates import retry_after_s
from gpuserve.front.memory.blocks import free_body
from gpuserve.front.v2.status import STATUS
from gpuserve.front.v2.types import InferRequest

CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
ACCEPT_ENCODING: Final = (b"grpc-accept-encoding", ACCEPTED_ENCODINGS.replace(" ", "").encode())
#: Before messages, and after them.
OK_HEADERS: Final = [CONTENT_TYPE, ACCEPT_ENCODING]
OK_TRAILERS: Final = [(b"grpc-status", b"0")]
#: Has clients that try again wait a moment: by then they know which servers are left. (gRPC proposal A6)
RETRY_PUSHBACK: Final = (b"grpc-retry-pushback-ms", b"100")
#: The same in whole seconds and by the name that HTTP has for it, which every client library shows.
RETRY_AFTER: Final = b"retry-after"
#: With it set to "true" the first error of a stream is its status.
STRICT_ERRORS: Final = b"triton_grpc_error"
#: Codings of responses, the first that a client reads is taken: gzip is one that every client has.
_PREFERENCE: Final = ("gzip", "deflate")
#: Of a ``grpc-message``, encoded. Clients refuse calls whose headers come to more than 8 KiB, status and all.
MAX_MESSAGE_NBYTES: Final = 7 << 10
_UNQUOTED: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


class CallHead(NamedTuple):
    """What the headers of a call say: the ``encoding`` of its messages ("" is identity), the ``coding`` of
    responses ("": none of ours), and ``strict_errors``: the first error of a stream is its status.
    """

    encoding: str
    coding: str
    timeout_s: float | None
    strict_errors: bool

    def limit(self, request: InferRequest, since: float | None = None) -> None:
        """Limit a request to what is left of the time of its call, which began at ``since``. Raises
        DeadlineExceeded if nothing is left; the body of the request is freed then.
        """
        limit_s = self.timeout_s
        if limit_s is not None and since is not None:
            limit_s -= time.monotonic() - since
            if limit_s <= 0:
                free_body(request)
                raise DeadlineExceeded(
                    f"Deadline Exceeded: the request did not come whole within its {self.timeout_s:g} s"
                )
        if limit_s is not None and (request.timeout_s is None or limit_s < request.timeout_s):
            request.timeout_s = limit_s


def read_call(head: Head) -> CallHead:
    headers: dict[bytes, bytes] = dict(head.headers)
    encoding = headers.get(b"grpc-encoding", b"identity").decode("latin-1")
    return CallHead(
        "" if encoding == IDENTITY else encoding,
        coding_for(head.headers),
        grpc_timeout_s(head.headers),
        headers.get(STRICT_ERRORS) == b"true",
    )


def coding_for(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The coding in which the client of a call reads responses; "" where it reads none of ours."""
    accepted: set[str] = set()
    for name, value in headers:
        if name == ACCEPT_ENCODING[0]:
            accepted.update(one.strip() for one in value.decode("latin-1").split(","))
    return next((one for one in _PREFERENCE if one in accepted), "")


def ok_head(coding: str = "") -> AnswerHead:
    """What goes around the message of a call that succeeds, which is compressed by ``coding``."""
    encoding = [(b"grpc-encoding", coding.encode())] if coding else []
    return AnswerHead(200, (*OK_HEADERS, *encoding), OK_TRAILERS)


OK: Final = ok_head()


def refuse(exchange: Exchange, error: RequestError) -> None:
    """End a call with the status of an error: in trailers after messages, else alone in the headers."""
    if exchange.started:
        exchange.finish(status_trailers(error))
    else:
        accepted = [ACCEPT_ENCODING] if error.code is Code.UNIMPLEMENTED else []
        exchange.start(200, [CONTENT_TYPE, *status_trailers(error), *accepted], end=True)


def status_trailers(error: RequestError) -> list[tuple[bytes, bytes]]:
    trailers = [
        (b"grpc-status", str(STATUS[error.code][1]).encode()),
        (b"grpc-message", grpc_message(str(error))),
    ]
    if isinstance(error, Stopping):
        trailers.append(RETRY_PUSHBACK)
    elif isinstance(error, RateLimited):
        trailers.append((RETRY_PUSHBACK[0], b"%d" % math.ceil(error.retry_after_s * 1000)))
        trailers.append((RETRY_AFTER, b"%d" % retry_after_s(error)))
    return trailers


def grpc_message(text: str) -> bytes:
    """An error text as the ``grpc-message`` header: percent-encoded UTF-8, printable ASCII as it is, and no
    more of it than every client takes.
    """
    text = text[:MAX_MESSAGE_NBYTES]
    while len(encoded := urllib.parse.quote(text, safe=_UNQUOTED)) > MAX_MESSAGE_NBYTES:
        text = text[: len(text) * MAX_MESSAGE_NBYTES // len(encoded)]
    return encoded.encode()
