"""One ``ModelStreamInfer`` call: requests go in, framed messages come out as answers become available.

Answers of models with one response a request, and refusals, are sent in the order of their requests;
responses of decoupled models are sent as they are produced. An error of a request is a message, and the
stream goes on, unless the client asked for ``strict_errors``: then the first error ends the call with its
status. A stopping server ends the call for every client, once the accepted requests are answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import RequestError, Stopping
from gpuserve.front.ipc.gather import free_body
from gpuserve.front.ipc.heap_memory import Share
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.net.exchange import Exchange, wake
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.protocols.access import header_forwarding as forwarding
from gpuserve.front.protocols.access.body_decoding import Buffer
from gpuserve.front.protocols.grpc.grpc_protocol import CHUNK_NBYTES, frame
from gpuserve.front.protocols.grpc.infer_decoder import parse_infer_request, parse_refused_message
from gpuserve.front.protocols.grpc.infer_encoder import Piece, check_size, response_parts, varint
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.service.inference_service import InferenceService

#: Back-pressure: no more requests are read from the connection while the client has this much to read, while
#: requests of this many bytes are in flight, or while this many answers wait for an earlier one; nor, while a
#: request is in flight, if the bodies of all clients together take most of the memory that they may.
MAX_UNREAD_NBYTES: Final = 4 << 20
MAX_PENDING_NBYTES: Final = 64 << 20
MAX_ORDERED: Final = 4096

#: A shared empty queue: most open streams have empty queues, and an empty deque takes 600 bytes.
_NOTHING: Final[deque[Any]] = deque()


class InferStream:
    """The requests and messages of one call, in one object because each of them bounds the others."""

    def __init__(
        self,
        service: InferenceService,
        *,
        strict_errors: bool,
        forwarded: dict[str, str] | None = None,
        reception: Reception | None = None,
        sender: Exchange,
    ) -> None:
        self._service = service
        #: Parameters that the call's headers add to each of its requests.
        self._forwarded = forwarded
        #: Trace record of the call, while any request is traced.
        self._reception = reception
        self._sender = sender
        self._strict_errors = strict_errors
        #: Intake share of requests that are incomplete or in flight.
        self.share = Share(service.intake, sender.endpoints.source)
        self._pending: set[PendingRequest] = set()
        #: Requests with one answer, sent in this order. A list is the ready message of a refused request.
        self._ordered: deque[PendingRequest | list[Piece]] = _NOTHING
        self._outbox: deque[tuple[list[Piece], InferResponse | None]] = _NOTHING
        self._unread_nbytes = 0
        self._pending_nbytes = 0
        #: The futures of the tasks that wait until the client has read, and for something to write.
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._no_more_requests = False
        #: No more requests are accepted because the server stops, not because the client sent its last one.
        self._stopping = False
        #: A request arrived after that. The status reports UNAVAILABLE, so that clients and proxies retry.
        self._rejected_while_stopping = False
        #: Whether only the status is still to be sent.
        self.has_ended = False
        self._failure: RequestError | None = None

    # ---- from the client ------------------------------------------------------------------

    def receive(
        self, body: Buffer, read: InferRequest | RequestError | None = None, nbytes: int | None = None
    ) -> None:
        """Submit one short serialised ``ModelInferRequest``, or the result ``read`` of parsing a message of
        ``nbytes``, of which ``body`` is the part that names the request. Errors are answered on the stream.
        """
        if self.has_ended:
            if isinstance(read, InferRequest):
                free_body(read)
            return
        if isinstance(read, RequestError):
            self.refuse(body, read)
            return
        try:
            request = parse_infer_request(body) if read is None else read
            if self._forwarded:
                try:
                    forwarding.add_forwarded(request, self._forwarded)
                except RequestError:
                    free_body(request)
                    raise
            request.reception = self._reception
            request.sender = self._sender
            self._submit(request, len(body) if nbytes is None else nbytes)
        except Stopping:
            self._rejected_while_stopping = self._no_more_requests = True
            wake(self._writer)
        except RequestError as error:
            self.refuse(body, error)

    def refuse(self, body: Buffer, error: RequestError) -> None:
        """Answer a serialised request with an error, or end the call if its client wants strict errors."""
        if self.has_ended:
            return
        message = parse_refused_message(body)
        name = "" if message is None else message.model_name
        if self._reception is not None and name not in self._service.models.latest:
            self._service.control.trace.on_unread(name, error, self._sender, self._reception)
        if self._strict_errors:
            self.fail(error)
            return
        self._enqueue_ordered(stream_error(message, error, named=False))
        self._flush_ordered()

    @property
    def is_full(self) -> bool:
        """Return whether the client must read answers before more requests are read."""
        return not self.has_ended and (
            self._unread_nbytes > MAX_UNREAD_NBYTES
            or self._pending_nbytes > MAX_PENDING_NBYTES
            or len(self._ordered) > MAX_ORDERED
            or (self._pending_nbytes > 0 and self._service.intake.is_crowded)
        )

    def hold(self, unread_nbytes: int) -> None:
        """Count the bytes held for requests in flight plus ``unread_nbytes``. Raises NoMemory."""
        self.share.hold(self._pending_nbytes + unread_nbytes)

    async def wait_for_room(self) -> None:
        """Wait until the client has read enough of its answers for more requests to be read."""
        while self.is_full:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def end_requests(self) -> None:
        """Note that the client sends no more requests; requests that it sent are still answered."""
        self._no_more_requests, self._stopping = True, False
        wake(self._writer)

    def fail(self, error: RequestError) -> None:
        """End the call with the status of this error. Nothing more is answered."""
        if self._failure is None and not self.has_ended:
            # Drop the traceback, whose frames refer to the message and to this stream.
            self._failure = error.with_traceback(None)
            self.cancel()

    def cancel(self) -> None:
        """Cancel every request, since nobody reads the answers any more."""
        self.has_ended = True
        for pending in list(self._pending):
            pending.cancel()
            pending.answer.cancel()
        self._pending.clear()
        for _, response in self._outbox:
            if response is not None:
                response.close()
        self._outbox.clear()
        wake(self._writer)
        wake(self._reader)

    # ---- to the client --------------------------------------------------------------------

    async def chunks(self) -> AsyncIterator[list[Piece]]:
        """Yield complete messages to write, in pieces, until all is answered. Raises the call's status."""
        unwatch = self._service.health.watch(self._on_service_changed)
        try:
            while True:
                if self._outbox:
                    chunk, responses = self._next_chunk()
                    try:
                        yield chunk
                    # The connection has the bytes now; earlier, the worker would compete with the copy.
                    finally:
                        for response in responses:
                            response.close()
                    continue
                if self.has_ended or (self._no_more_requests and not self._pending):
                    break
                self._writer = asyncio.get_running_loop().create_future()
                await self._writer
        finally:
            unwatch()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # the error refers to this frame
        if self._stopping or self._rejected_while_stopping:
            raise Stopping("the server is stopping: what was not answered on this stream was not run")

    def _on_service_changed(self) -> None:
        """Stop accepting requests when the server drains, and fail the call when the server ends."""
        if self._service.health.ended:
            self.fail(Stopping("the server is stopping"))
        elif self._service.health.draining and not self._no_more_requests:
            self._no_more_requests = self._stopping = True
            wake(self._writer)

    def _next_chunk(self) -> tuple[list[Piece], list[InferResponse]]:
        """Return the next pieces to write, and the responses that they belong to."""
        pieces: list[Piece] = []
        responses: list[InferResponse] = []
        nbytes = 0
        while self._outbox and nbytes < CHUNK_NBYTES:
            message, response = self._outbox.popleft()
            pieces += message
            nbytes += sum(map(len, message))
            if response is not None:
                responses.append(response)
        self._unread_nbytes -= nbytes
        wake(self._reader)
        if nbytes < 2 * CHUNK_NBYTES:  # thousands of short messages, or a single long message
            pieces = [b"".join(pieces)]
        return pieces, responses

    def _enqueue_message(self, pieces: list[Piece], response: InferResponse | None = None) -> None:
        if not self.has_ended:
            if self._outbox is _NOTHING:
                self._outbox = deque()
            self._outbox.append((pieces, response))
            self._unread_nbytes += sum(map(len, pieces))
            wake(self._writer)
        elif response is not None:
            response.close()

    def _enqueue_ordered(self, ordered: PendingRequest | list[Piece]) -> None:
        if self._ordered is _NOTHING:
            self._ordered = deque()
        self._ordered.append(ordered)

    # ---- answers --------------------------------------------------------------------------

    def _submit(self, request: InferRequest, nbytes: int) -> None:
        try:
            decoupled = self._service.models.find(request.model_name, request.model_version).spec.decoupled
        except RequestError:
            free_body(request)
            raise

        def on_response(response: InferResponse) -> None:
            self._on_response(pending, response)

        pending = self._service.inference.submit(request, on_response if decoupled else None)
        self._pending.add(pending)
        self._pending_nbytes += nbytes
        if not decoupled:
            self._enqueue_ordered(pending)

        def on_answer(answer: asyncio.Future[Any]) -> None:
            self._pending_nbytes -= nbytes
            if self.share.nbytes:
                self.share.hold(max(0, self.share.nbytes - nbytes))
            wake(self._reader)
            self._on_answer(pending, answer)

        pending.answer.add_done_callback(on_answer)

    def _on_response(self, pending: PendingRequest, response: InferResponse) -> None:
        try:
            self._enqueue_message(self._message(pending, response, final=False), response)
        except RequestError as error:  # the model set a value that gRPC cannot carry
            response.close()
            self._enqueue_message(stream_error(pending.request, error, named=False))

    def _on_answer(self, pending: PendingRequest, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            return
        if self.has_ended:
            if answer.exception() is None and answer.result() is not None:
                answer.result().close()
        elif pending.on_response is None:
            self._flush_ordered()
        else:
            self._send_answer(pending)
        wake(self._writer)

    def _flush_ordered(self) -> None:
        """Send the answers that wait for no earlier one. ``cancel`` closes those that still wait."""
        while self._ordered and (isinstance(first := self._ordered[0], list) or first.answer.done()):
            self._ordered.popleft()
            if isinstance(first, list):
                self._enqueue_message(first)
            else:
                self._send_answer(first)

    def _send_answer(self, pending: PendingRequest) -> None:
        self._pending.discard(pending)
        error = pending.answer.exception()
        answer = error if isinstance(error, RequestError) else pending.answer.result()
        request = pending.request
        if isinstance(answer, RequestError):
            self._refuse(request, answer)
        elif answer is not None:  # of a decoupled model: the response that the model marked as the last
            try:
                self._enqueue_message(self._message(pending, answer, final=True), answer)
            except RequestError as unfit:
                answer.close()
                self._refuse(request, unfit)
        elif request.empty_final:
            named = InferResponse(request.model_name, request.model_version, request.id, {}, [])
            self._enqueue_message(stream_response(named, final=True))

    def _refuse(self, request: InferRequest, error: RequestError) -> None:
        if error.untried and isinstance(error, Stopping):
            self._rejected_while_stopping = self._no_more_requests = True
            wake(self._writer)
        elif self._strict_errors:
            self.fail(error)
        else:
            self._enqueue_message(stream_error(request, error, named=not error.untried))

    def _message(self, pending: PendingRequest, response: InferResponse, *, final: bool) -> list[Piece]:
        """Encode a response as the client asked for it. If this raises, the caller closes the response."""
        if pending.request.class_counts:
            self._service.inference.classify(response, pending)
        return stream_response(response, final=final)


# ModelStreamInferResponse has an error_message (1) and an infer_response (2). Each is a tag and a length
# before bytes, so nothing passes through protobuf a second time.

FINAL_RESPONSE: Final = "triton_final_response"
_RESPONSE_TAG: Final = b"\x12"

#: The serialised parameter that every response of a stream carries.
_FINAL: Final[dict[bool, bytes]] = {
    final: pb.ModelInferResponse(
        parameters={FINAL_RESPONSE: pb.InferParameter(bool_param=final)}
    ).SerializeToString()
    for final in (True, False)
}


def stream_response(response: InferResponse, *, final: bool) -> list[Piece]:
    """Return a response in pieces, maybe of its own memory: close the response when they are copied."""
    parts = [*response_parts(response), _FINAL[final]]
    nbytes = sum(map(len, parts))
    head = _RESPONSE_TAG + varint(nbytes)
    return [frame(check_size(len(head) + nbytes)) + head, *parts]


def stream_error(request: Any, error: RequestError, *, named: bool) -> list[Piece]:
    """Return an error message that leaves the stream open, about a request, an unparsed message, or None.
    ``named``: the request was accepted, and this is its last response.
    """
    message = pb.ModelStreamInferResponse(error_message=str(error))
    if request is not None:
        message.infer_response.id = request.id
        if named:
            message.infer_response.model_name = request.model_name
            message.infer_response.model_version = request.model_version
            message.infer_response.parameters[FINAL_RESPONSE].bool_param = True
    encoded: bytes = message.SerializeToString()
    return [frame(len(encoded)), encoded]
