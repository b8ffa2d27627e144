"""One ``ModelStreamInfer`` call: requests go in as they come, framed messages come out as answers are there.
Knows the service and the codec, and no exchange.

Answers of models that give one, and refusals, are sent in the order of their requests; the responses of
decoupled models as they are produced. An error of a request is a message, and the stream goes on, unless
the client asked for ``strict_errors``: then the first one ends the call with its status. So does, for every
client, the end of the server, once what it has taken is answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import RequestError, Stopping
from gpuserve.front.doors.access import forwarding
from gpuserve.front.doors.access.inflation import Buffer
from gpuserve.front.doors.grpc.framing import frame
from gpuserve.front.doors.grpc.requests import message_of, parse_infer_request
from gpuserve.front.doors.grpc.responses import Piece, check_size, response_parts, varint
from gpuserve.front.exchange.exchange import Exchange
from gpuserve.front.memory.blocks import free_body
from gpuserve.front.memory.intake import Share
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.observe.tracing.reception import Reception
from gpuserve.front.service.service import InferenceService
from gpuserve.front.v2.types import InferRequest, InferResponse

#: As much is written in one go; what comes after it waits for the next.
CHUNK_NBYTES: Final = 1 << 20
#: No more requests are taken off the connection while a client has so much to read, while requests of so many
#: bytes are under way, or so many answers wait for an earlier one; nor, while one is under way, where the
#: bodies of all clients together take much of the memory that they may.
MAX_UNREAD_NBYTES: Final = 4 << 20
MAX_PENDING_NBYTES: Final = 64 << 20
MAX_ORDERED: Final = 4096


#: Most streams of those that are only open have nothing in their queues: an empty deque takes 600 bytes.
_NOTHING: Final[deque[Any]] = deque()


class _Ordered:
    """A request whose one answer waits until those before it have been sent."""

    __slots__ = ("answer", "pending")

    def __init__(self, pending: PendingRequest) -> None:
        self.pending = pending
        self.answer: InferResponse | RequestError | None = None


class InferStream:
    """One call's requests and messages, in one object, as each of them bounds the others."""

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
        #: Notes when what comes and goes of the call, while anything is traced.
        self._reception = reception
        self._sender = sender
        self._strict_errors = strict_errors
        #: What is kept of requests that have not come whole, or are under way.
        self.share = Share(service.intake, sender.ends.source)
        self._pending: set[PendingRequest] = set()
        #: In the order of the requests; the message of one that was refused waits as it is.
        self._ordered: deque[_Ordered | list[Piece]] = _NOTHING
        self._outbox: deque[tuple[list[Piece], InferResponse | None]] = _NOTHING
        self._unread_nbytes = 0
        self._pending_nbytes = 0
        #: What waits until the client has read, and who writes until there is something to write.
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._no_more_requests = False
        #: Nothing more is taken because the server ends, not because the client has said everything.
        self._stopping = False
        #: A request came after that. The status says so and not a message: then clients and proxies that ask
        #: again on UNAVAILABLE do.
        self._turned_away = False
        self._ended = False
        self._failure: RequestError | None = None

    # ---- from the client ------------------------------------------------------------------

    def take(
        self, body: Buffer, read: InferRequest | RequestError | None = None, nbytes: int | None = None
    ) -> None:
        """Take one short serialised ``ModelInferRequest``, or what one of ``nbytes`` was ``read`` to, of
        which ``body`` is what names it. Whatever is wrong with it is answered on the stream.
        """
        if self._ended:
            if isinstance(read, InferRequest):
                free_body(read)
            return
        if isinstance(read, RequestError):
            self.refuse(body, read)
            return
        try:
            request = parse_infer_request(body) if read is None else read
            if self._forwarded:
                self._forward(request, self._forwarded)
            request.reception = self._reception
            request.sender = self._sender
            self._submit(request, len(body) if nbytes is None else nbytes)
        except Stopping:
            self._turned_away = self._no_more_requests = True
            _wake(self._writer)
        except RequestError as error:
            self.refuse(body, error)

    def refuse(self, body: Buffer, error: RequestError) -> None:
        """Answer a serialised request with an error, or end the call if its client wants strict errors."""
        if self._ended:
            return
        if self._strict_errors:
            self.fail(error)
            return
        self._queue(stream_error(message_of(body), error, named=False))
        self._flush_ordered()

    @property
    def is_full(self) -> bool:
        """Whether the client is to read of its answers before it is asked for more requests."""
        return not self._ended and (
            self._unread_nbytes > MAX_UNREAD_NBYTES
            or self._pending_nbytes > MAX_PENDING_NBYTES
            or len(self._ordered) > MAX_ORDERED
            or (self._pending_nbytes > 0 and self._service.intake.is_crowded)
        )

    def hold(self, unread_nbytes: int) -> None:
        """Count what is kept of the client's requests, and so many bytes of the next. Raises NoMemory."""
        self.share.hold(self._pending_nbytes + unread_nbytes)

    async def wait_for_room(self) -> None:
        """Until the client has read enough of its answers to be asked for more requests."""
        while self.is_full:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def close_requests(self) -> None:
        """The client sends no more; what it sent is still answered."""
        self._no_more_requests, self._stopping = True, False
        _wake(self._writer)

    def fail(self, error: RequestError) -> None:
        """End the call with this status. Nothing is answered any more."""
        if self._failure is None and not self._ended:
            # Its frames refer to what came of a message, and to this stream.
            self._failure = error.with_traceback(None)
            self.cancel()

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more is to be sent but the status."""
        return self._ended

    def cancel(self) -> None:
        """Nobody listens any more: every request is taken back."""
        self._ended = True
        for pending in list(self._pending):
            pending.take_back()
            pending.answer.cancel()
        self._pending.clear()
        for _, response in self._outbox:
            if response is not None:
                response.close()
        self._outbox.clear()
        _wake(self._writer)
        _wake(self._reader)

    # ---- to the client --------------------------------------------------------------------

    async def chunks(self) -> AsyncIterator[list[Piece]]:
        """Yield whole messages to be written, in pieces, until everything is answered; RequestError is the
        status of the call.
        """
        unwatch = self._service.health.watch(self._on_service_changed)
        try:
            while True:
                if self._outbox:
                    chunk, responses = self._next_chunk()
                    try:
                        yield chunk
                    finally:  # it is with the connection now; before, the worker would compete with it
                        for response in responses:
                            response.close()
                    continue
                if self._ended or (self._no_more_requests and not self._pending):
                    break
                self._writer = asyncio.get_running_loop().create_future()
                await self._writer
        finally:
            unwatch()
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # which refers to this frame
        if self._stopping or self._turned_away:
            raise Stopping("the server is stopping: what was not answered on this stream was not run")

    def _on_service_changed(self) -> None:
        """A server that stops takes nothing new, and does not wait for clients that only keep a call open."""
        if self._service.health.ended:
            self.fail(Stopping("the server is stopping"))
        elif self._service.health.draining and not self._no_more_requests:
            self._no_more_requests = self._stopping = True
            _wake(self._writer)

    def _next_chunk(self) -> tuple[list[Piece], list[InferResponse]]:
        """What is to be written next, and the responses in it."""
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
        _wake(self._reader)
        if nbytes < 2 * CHUNK_NBYTES:  # thousands of short messages, or a single long one
            pieces = [b"".join(pieces)]
        return pieces, responses

    def _put(self, pieces: list[Piece], response: InferResponse | None = None) -> None:
        if not self._ended:
            if self._outbox is _NOTHING:
                self._outbox = deque()
            self._outbox.append((pieces, response))
            self._unread_nbytes += sum(map(len, pieces))
            _wake(self._writer)
        elif response is not None:
            response.close()

    def _queue(self, ordered: _Ordered | list[Piece]) -> None:
        if self._ordered is _NOTHING:
            self._ordered = deque()
        self._ordered.append(ordered)

    # ---- answers --------------------------------------------------------------------------

    def _forward(self, request: InferRequest, forwarded: dict[str, str]) -> None:
        try:
            forwarding.add(request, forwarded)
        except RequestError:
            free_body(request)
            raise

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
        ordered = None if decoupled else _Ordered(pending)
        if ordered is not None:
            self._queue(ordered)

        def on_answer(answer: asyncio.Future[Any]) -> None:
            self._pending_nbytes -= nbytes
            if self.share.nbytes:
                self.share.hold(max(0, self.share.nbytes - nbytes))
            _wake(self._reader)
            self._on_answer(pending, ordered, answer)

        pending.answer.add_done_callback(on_answer)

    def _on_response(self, pending: PendingRequest, response: InferResponse) -> None:
        """One response of a decoupled model; more may follow."""
        try:
            self._put(self._message(pending, response, final=False), response)
        except RequestError as error:  # the model put something into it that gRPC cannot carry
            response.close()
            self._put(stream_error(pending.request, error, named=False))

    def _on_answer(
        self, pending: PendingRequest, ordered: _Ordered | None, answer: asyncio.Future[Any]
    ) -> None:
        self._pending.discard(pending)
        if answer.cancelled():
            return
        error = answer.exception()
        given = error if isinstance(error, RequestError) else answer.result()
        if self._ended:
            if isinstance(given, InferResponse):
                given.close()
        elif ordered is None and isinstance(given, InferResponse):
            self._give(pending, given)  # the model said of it that it was the last
        elif ordered is None:
            self._end_stream(pending.request, given)
        else:
            ordered.answer = given
            self._flush_ordered()
        _wake(self._writer)

    def _end_stream(self, request: InferRequest, error: RequestError | None) -> None:
        if error is not None:
            self._refuse(request, error)
        elif request.empty_final:
            self._put(empty_final(request))

    def _flush_ordered(self) -> None:
        while self._ordered:
            first = self._ordered[0]
            if isinstance(first, list):
                self._ordered.popleft()
                self._put(first)
            elif first.answer is None:
                return
            else:
                self._ordered.popleft()
                self._give(first.pending, first.answer)

    def _give(self, pending: PendingRequest, answer: InferResponse | RequestError) -> None:
        if isinstance(answer, RequestError):
            self._refuse(pending.request, answer)
            return
        try:
            self._put(self._message(pending, answer, final=True), answer)
        except RequestError as error:
            answer.close()
            self._refuse(pending.request, error)

    def _refuse(self, request: InferRequest, error: RequestError) -> None:
        if error.untried and isinstance(error, Stopping):
            self._turned_away = self._no_more_requests = True
            _wake(self._writer)
        elif self._strict_errors:
            self.fail(error)
        else:
            self._put(stream_error(request, error, named=not error.untried))

    def _message(self, pending: PendingRequest, response: InferResponse, *, final: bool) -> list[Piece]:
        """A response as the client asked for it; after a RequestError it is the caller's to close."""
        if pending.request.class_counts:
            self._service.inference.classify(response, pending)
        return stream_response(response, final=final)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


# ---- messages: ModelStreamInferResponse has an error_message (1) and an infer_response (2), which are a tag
# and a length before bytes, so nothing passes through protobuf a second time

FINAL_RESPONSE: Final = "triton_final_response"
_RESPONSE_TAG: Final = b"\x12"


def _final_parameter(final: bool) -> bytes:
    message = pb.ModelInferResponse()
    message.parameters[FINAL_RESPONSE].bool_param = final
    encoded: bytes = message.SerializeToString()
    return encoded


#: The parameter that every response of a stream carries, serialised.
_FINAL: Final = {final: _final_parameter(final) for final in (True, False)}


def stream_response(response: InferResponse, *, final: bool) -> list[Piece]:
    """A response in pieces, maybe the outputs' own memory: close it when they are copied."""
    parts = [*response_parts(response), _FINAL[final]]
    nbytes = sum(map(len, parts))
    head = _RESPONSE_TAG + varint(nbytes)
    return [frame(check_size(len(head) + nbytes)) + head, *parts]


def empty_final(request: InferRequest) -> list[Piece]:
    """The last word of a stream, without outputs, for a client that asked for it."""
    named = InferResponse(request.model_name, request.model_version, request.id, {}, [])
    return stream_response(named, final=True)


def stream_error(request: Any, error: RequestError, *, named: bool) -> list[Piece]:
    """An error that leaves the stream open; ``request`` is the request, or a message that became none, or
    None. ``named``: the request was accepted, and this is its last response.
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
