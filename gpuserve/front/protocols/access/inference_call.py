"""The parts that inference calls of gRPC and HTTP share. A call is a ``BodyReceiver`` without a coroutine:
the connection calls it with the body, and the model with the answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from gpuserve.core.errors import DeadlineExceeded, RequestError
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.heap_memory import REQUEST_NBYTES, Share
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.net.exchange import AnswerHead, Exchange, Piece
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.protocols.access.body_decoding import client_error
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.service.inference_service import InferenceService


class InferenceContext:
    """State shared by all inference calls of a protocol. Bodies have at most ``max_request_nbytes``.
    ``level`` is zlib's for responses over gRPC, 0 for none.
    """

    def __init__(
        self,
        service: InferenceService,
        max_request_nbytes: int,
        forwarding: HeaderForwarding | None = None,
        level: int = 0,
    ) -> None:
        self.service = service
        self.submit = service.inference.submit
        self.receptions = service.control.trace.receptions
        self.max_request_nbytes = max_request_nbytes
        self.inflation = service.inflation.within(max_request_nbytes)
        self.forwarding = forwarding
        self.level = level
        #: For messages that take long to parse or to encode.
        self.executor = service.json_executor


class InferenceCall:
    """One call. A subclass reads the body, submits the request, encodes the answer, and sets all attributes,
    because a call of a base class's constructor costs as much as a small part of the request.
    """

    __slots__ = (
        "_context", "_exchange", "_pending", "_reception", "_share", "_since", "_started_ns",
        "_submitted_name", "_timeout_s", "is_done",
    )  # fmt: skip

    _IS_GRPC: ClassVar[bool]
    _context: InferenceContext
    _exchange: Exchange
    _pending: PendingRequest | None
    #: The counted memory of the body; a body that arrives in one small part is not counted.
    _share: Share | None
    #: If tracing is on: the start time, and the trace of this request.
    _started_ns: int
    _reception: Reception | None
    #: The client's time limit for the call, and the start of the call if its body arrives in several parts.
    _timeout_s: float | None
    _since: float | None
    #: Whether the call is answered or abandoned, so that nothing more is read.
    is_done: bool

    def abandon(self) -> None:
        self.is_done = True
        self._release_memory()
        if self._pending is not None:
            self._pending.cancel()
        if self._reception is not None:
            self._reception.close()

    def refuse(self, error: Exception) -> None:
        """Answer with an error unless answered."""
        visible = client_error(error, f"serving {self._exchange.head.path}")
        if not self.is_done:
            if self._started_ns and self._pending is None and self._reception is None:
                trace, reception = self._context.service.control.trace, self.receive()
                if reception is not None:
                    trace.on_unread(self._traced_name(), visible, self._exchange, reception)
            self.is_done, self._pending = True, None
            self._release_memory()
            if self._reception is None:
                self._send_error(visible)
            else:
                self._reception.send(partial(self._send_error, visible))

    def receive(self) -> Reception | None:
        """Return the trace of a request that has been read, if the request is traced."""
        receptions, headers = self._context.receptions, self._exchange.head.headers
        self._reception = receptions.of(headers, grpc=self._IS_GRPC, began_ns=self._started_ns)
        return self._reception

    def _traced_name(self) -> str:
        """Return the model of a refused request, or "" if its name could not be read. Needs tracing."""
        return getattr(self, "_submitted_name", "")

    def _new_share(self) -> Share:
        return Share(self._context.service.intake, self._exchange.endpoints.source, REQUEST_NBYTES)

    def _submit(self, request: InferRequest) -> None:
        context = self._context
        if context.forwarding is not None:
            context.forwarding.add_to(request, self._exchange.head)
        if self._timeout_s is not None:
            self._limit_time(request, self._timeout_s)
        if self._started_ns:
            request.receiver, self._submitted_name = self, request.model_name
        request.sender = self._exchange
        pending = context.submit(request, None, self._on_answer)
        if not self.is_done:
            self._pending = pending

    def _limit_time(self, request: InferRequest, limit_s: float) -> None:
        """Limit the request's timeout to the rest of the call's. Free the body and raise if none is left."""
        left_s = limit_s if self._since is None else limit_s - (time.monotonic() - self._since)
        if left_s <= 0 and self._since is not None:
            free_body(request)
            raise DeadlineExceeded(
                f"Deadline Exceeded: the request did not come whole within its {limit_s:g} s"
            )
        if request.timeout_s is None or left_s < request.timeout_s:
            request.timeout_s = left_s

    def _send(self, head: AnswerHead, pieces: Sequence[Piece], nbytes: int, response: InferResponse) -> None:
        self.is_done = True
        send = partial(self._exchange.answer, head, pieces, nbytes, response.close)
        if self._reception is None:
            send()
        else:
            self._reception.send(send)

    def _send_compressed(
        self, response: InferResponse, found: tuple[AnswerHead, Sequence[Piece]] | RequestError
    ) -> None:
        """Send a response that a thread has compressed."""
        if isinstance(found, RequestError) or self.is_done:
            response.close()
            if isinstance(found, RequestError):
                self.refuse(found)
        else:
            head, pieces = found
            body = b"".join(pieces)
            self._send(head, (body,), len(body), response)

    def _on_answer(self, pending: PendingRequest, answer: Answer) -> None:
        raise NotImplementedError

    def _send_error(self, error: RequestError) -> None:
        raise NotImplementedError

    def _release_memory(self) -> None:
        """Release the counted memory, and free the blocks of a body that did not become a request."""
        raise NotImplementedError
