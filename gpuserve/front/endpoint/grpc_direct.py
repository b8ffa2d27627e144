"""``ModelInfer`` over the server of our own, without ASGI: no task, no coroutine, one call after the other.

What is rare about a call (compression, no trailers) is left to ``grpc_asgi``, by saying None. Answers are the
same, to the byte.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from gpuserve.errors import Internal, RequestError
from gpuserve.front.endpoint import grpc_requests, grpc_responses
from gpuserve.front.endpoint.asgi import MODEL_INFER
from gpuserve.front.endpoint.forwarding import HeaderForwarding
from gpuserve.front.endpoint.grpc_asgi import INGEST_NBYTES
from gpuserve.front.endpoint.grpc_framing import PREFIX_NBYTES, read_prefix, surplus, unary_message
from gpuserve.front.endpoint.grpc_headers import (
    OK_HEADERS,
    OK_TRAILERS,
    encoding_of,
    refusal_headers,
    timeout_s_of,
)
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.endpoint.v2 import InferRequest, InferResponse
from gpuserve.front.plane.grpc_ingest import GrpcBodyScanner
from gpuserve.front.plane.scatter import Answer
from gpuserve.front.scheduler.pending import PendingRequest
from gpuserve.front.server.exchange import Exchange, Head, Piece
from gpuserve.front.server.hpack import encode, status_field
from gpuserve.front.server.http2_stream import Stream
from gpuserve_worker.memory import Block

logger = logging.getLogger(__name__)

_HEAD: Final = encode((status_field(200), *OK_HEADERS))
_TAIL: Final = encode(OK_TRAILERS)
_GRPC: Final = b"application/grpc"


class _Reading(NamedTuple):
    """What the head of a call says; not ``direct``: the call is not for this door."""

    direct: bool
    timeout_s: float | None = None


class GrpcDirectDoor:
    """Answers the calls of ``ModelInfer`` that need nothing special."""

    def __init__(
        self, service: InferenceService, max_request_nbytes: int, forwarding: HeaderForwarding | None = None
    ) -> None:
        self.service = service
        self.max_request_nbytes = max_request_nbytes
        self.forwarding = forwarding

    def __call__(self, exchange: Exchange) -> InferCall | None:
        """The sink of a call, or None for what is to be answered otherwise."""
        head = exchange.head
        if head.path != MODEL_INFER or type(exchange) is not Stream:
            return None
        reading: _Reading | None = head.memo
        if reading is None:
            reading = head.memo = _read(head)
        return InferCall(self, exchange, reading.timeout_s) if reading.direct else None


class InferCall:
    """One call: collects the message, submits its request, and sends the answer when it is called back."""

    __slots__ = ("_door", "_parts", "_pending", "_scanner", "_stream", "_through", "_timeout_s")

    def __init__(self, door: GrpcDirectDoor, stream: Stream, timeout_s: float | None) -> None:
        self._door = door
        self._stream = stream
        self._timeout_s = timeout_s
        self._parts: bytearray | None = None
        self._scanner: GrpcBodyScanner | None = None
        self._pending: PendingRequest | None = None
        #: Answered, or given up.
        self._through = False

    # ---- the request ----------------------------------------------------------------------

    def take(self, data: Piece, end: bool) -> None:
        """The next part of the message."""
        self._stream.consumed(len(data))
        try:
            if self._scanner is not None:
                self._scanner.feed(data)
            elif self._parts is None and end and len(data) < INGEST_NBYTES:
                self._submit(self._parse(bytes(data)))
                return
            else:
                self._collect(data)
            if end:
                self._submit(self._whole())
        except RequestError as error:
            self._refuse(error)
        except Exception:
            logger.exception("defect while serving %s", MODEL_INFER)
            self._refuse(Internal("internal error of the server"))

    def abandon(self) -> None:
        """The client is gone, or does not want the answer."""
        self._through = True
        self._drop_blocks()
        if self._pending is not None:
            self._pending.take_back()

    def _collect(self, data: Piece) -> None:
        """Keep what has come of a small message, or begin to place a large one."""
        parts = self._parts = bytearray() if self._parts is None else self._parts
        parts += data
        if len(parts) < PREFIX_NBYTES:
            return
        nbytes = read_prefix(parts, self._door.max_request_nbytes)[1]
        if len(parts) > PREFIX_NBYTES + nbytes:
            raise surplus()
        if nbytes < INGEST_NBYTES:
            return
        self._scanner = GrpcBodyScanner(self._allocate, self._door.max_request_nbytes)
        self._scanner.feed(parts)
        self._parts = None

    def _whole(self) -> InferRequest:
        if self._scanner is not None:
            return self._scanner.finish()
        return self._parse(bytes(self._parts or b""))

    def _parse(self, body: bytes) -> InferRequest:
        if body[:1] == b"\0" and int.from_bytes(body[1:PREFIX_NBYTES]) == len(body) - PREFIX_NBYTES:
            return grpc_requests.parse_infer_request(body[PREFIX_NBYTES:])
        return grpc_requests.parse_infer_request(unary_message(body, self._door.max_request_nbytes))

    def _allocate(self, model_name: str, nbytes: int) -> Block | None:
        version = "" if self._scanner is None else self._scanner.model_version
        return self._door.service.allocate(model_name, nbytes, version)

    def _submit(self, request: InferRequest) -> None:
        door = self._door
        self._scanner = None
        if door.forwarding is not None:
            door.forwarding.add_to(request, self._stream.head.headers)
        timeout_s = self._timeout_s
        if timeout_s is not None and (request.timeout_s is None or timeout_s < request.timeout_s):
            request.timeout_s = timeout_s
        pending = door.service.submit(request, on_answer=self._answer)
        if not self._through:
            self._pending = pending

    # ---- the answer -----------------------------------------------------------------------

    def _answer(self, pending: PendingRequest, answer: Answer) -> None:
        """Called once the answer is there."""
        if not isinstance(answer, InferResponse):
            self._refuse(answer or Internal("a stream ended that was no stream"))
            return
        try:
            if pending.request.class_counts:
                self._door.service.classify(answer, pending)
            pieces = grpc_responses.encode_infer_response(answer, framed=True)
        except RequestError as error:
            answer.close()
            self._refuse(error)
            return
        except Exception:
            logger.exception("defect while answering %s", MODEL_INFER)
            answer.close()
            self._refuse(Internal("internal error of the server"))
            return
        self._through = True
        self._pending = None  # which refers to this call: nothing is left to the garbage collector
        nbytes = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        self._stream.answer(_HEAD, pieces, nbytes, _TAIL, answer.close)

    def _refuse(self, error: RequestError) -> None:
        """Trailers-Only: the status is in the head, and there is no body."""
        if not self._through:
            self._through = True
            self._pending = None
            self._drop_blocks()
            self._stream.start(200, refusal_headers(error), end=True)

    def _drop_blocks(self) -> None:
        """Free what a message that did not become a request was placed in."""
        scanner, self._scanner = self._scanner, None
        if scanner is not None:
            for block in scanner.abort():
                block.free()


def _read(head: Head) -> _Reading:
    headers = dict(head.headers)
    is_plain = headers.get(b"content-type", b"").startswith(_GRPC) and not encoding_of(headers)
    if not (is_plain and head.trailers):
        return _Reading(direct=False)
    return _Reading(direct=True, timeout_s=timeout_s_of(headers))
