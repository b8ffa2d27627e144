"""The gRPC protocol server: access control and dispatch by call headers, and the methods that await, over an
``AsyncRequest``. ``ModelInfer``, which awaits nothing, is in ``model_infer.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Final

from gpuserve.config.settings.server import NO_COMPRESSION
from gpuserve.core.errors import DeadlineExceeded, InvalidArgument, NoMemory, RequestError
from gpuserve.front.ipc.gather import heap_nbytes
from gpuserve.front.ipc.heap_memory import Share
from gpuserve.front.net.admission import Admission, OpenStreams
from gpuserve.front.net.async_requests import AsyncRequest, AsyncRequests, ClientGone
from gpuserve.front.net.exchange import BodyReceiver, Exchange, Head, RequestHandler
from gpuserve.front.net.request_rate_limiter import RequestRates
from gpuserve.front.observability.tracing.request_trace import Reception
from gpuserve.front.protocols.access import body_decoding as decoding
from gpuserve.front.protocols.access.authorization import (
    GRPC_PREFIX,
    AccessPolicy,
    RateLimit,
    Verdict,
    address_of,
    client_uid,
    is_local_client,
)
from gpuserve.front.protocols.access.body_decoding import Slice, offload, parse_off_loop
from gpuserve.front.protocols.access.endpoints import METHODS, Access
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding
from gpuserve.front.protocols.access.inference_call import InferenceContext
from gpuserve.front.protocols.grpc import grpc_protocol as protocol
from gpuserve.front.protocols.grpc import reflection, unary_rpcs
from gpuserve.front.protocols.grpc.grpc_protocol import CallHead, Method, Refused, RefusedStream
from gpuserve.front.protocols.grpc.infer_decoder import SHORT_NBYTES
from gpuserve.front.protocols.grpc.model_infer import (
    COLLECTED_NBYTES,
    INGEST_NBYTES,
    InferCall,
    read_by_template,
)
from gpuserve.front.protocols.grpc.model_stream_infer import InferStream
from gpuserve.front.protocols.grpc.request_scanner import GrpcBodyScanner
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.service.inference_service import InferenceService
from gpuserve_worker.memory.arena import Block

#: Smaller stream requests that arrive whole are not counted, unless the stream holds other memory.
_UNCOUNTED_NBYTES: Final = 8 << 10
#: Calls of these methods are refused without waiting for the end of their requests.
_STREAMS: Final = frozenset({unary_rpcs.MODEL_STREAM_INFER, *reflection.METHODS})


class GrpcHandler:
    """The handler of all gRPC calls; failures become statuses. ``compression``: level of responses."""

    def __init__(
        self,
        service: InferenceService,
        requests: AsyncRequests,
        max_request_nbytes: int,
        policy: AccessPolicy | None = None,
        forwarding: HeaderForwarding | None = None,
        compression: str = NO_COMPRESSION,
        streams: OpenStreams | None = None,
        limit: RateLimit | None = None,
    ) -> None:
        self._service = service
        self._streams = streams or Admission().streams
        self._requests = requests
        self._policy = policy or AccessPolicy()
        self._inference = InferenceContext(
            service, max_request_nbytes, forwarding, protocol.LEVELS[compression]
        )
        service.health.watch(self._on_health)
        streaming = StreamingInference(self._inference, limit or RateLimit(RequestRates()))
        self._methods: dict[str, Method] = {
            unary_rpcs.MODEL_STREAM_INFER: streaming.serve,
            unary_rpcs.HEALTH_WATCH: partial(unary_rpcs.serve_health_watch, service.health),
            **dict.fromkeys(unary_rpcs.UNARY, self._serve_unary),
            **dict.fromkeys(reflection.METHODS, self._serve_reflection),
        }

    def accept(self, exchange: Exchange) -> BodyReceiver:
        """Return the body receiver of a call. Calls with equal headers share one resolved handler."""
        head = exchange.head
        handler: RequestHandler | None = head.memo
        if handler is None:
            handler = head.memo = self._resolve_handler(head)
        return handler(exchange)

    def refuse(self, error: RequestError, exchange: Exchange) -> BodyReceiver:
        """Return the body receiver that answers a call with an error, whatever its messages say."""
        return (RefusedStream if exchange.head.path in _STREAMS else Refused)(error, exchange)

    def _resolve_handler(self, head: Head) -> RequestHandler:
        access = METHODS.get(head.path)
        if access is None:
            return partial(Refused, unary_rpcs.unimplemented(head.path))
        handler = self._permitted_handler(head)
        if self._policy.is_public(access):
            return handler
        verdict = self._policy.judge(access, head.headers, is_local=False, prefix=GRPC_PREFIX)
        if verdict is Verdict.ALLOWED:
            return handler
        refusal = self._policy.refusal(access, verdict, GRPC_PREFIX)
        refused = partial(RefusedStream if head.path in _STREAMS else Refused, refusal)
        if verdict is Verdict.NO_TOKEN:
            return refused
        if verdict is Verdict.READ_ONLY:
            reads = partial(self._serve_unary, read_only=True)
            call = protocol.parse_call_head(head)
            other = partial(self._start_task, reads, call) if head.trailers else handler
            return partial(self._choose_by_locality, access, handler, other)
        return partial(self._choose_by_locality, access, handler, refused)

    def _permitted_handler(self, head: Head) -> RequestHandler:
        call = protocol.parse_call_head(head)
        if not head.trailers:
            return partial(Refused, InvalidArgument(protocol.NO_TRAILERS))
        if head.path == unary_rpcs.MODEL_INFER:
            return partial(InferCall, self._inference, call)
        return partial(self._start_task, self._methods[head.path], call)

    def _choose_by_locality(
        self, access: Access, local: RequestHandler, remote: RequestHandler, exchange: Exchange
    ) -> BodyReceiver:
        """Use ``local`` for clients on this machine and ``remote`` for all others."""
        is_here = is_local_client(address_of(exchange.endpoints), exchange.head.headers)
        return (local if is_here else remote)(exchange)

    def _on_health(self) -> None:
        if self._service.health.draining or self._service.health.ended:
            self._requests.start_all_dormant()

    def _start_task(self, method: Method, call: CallHead, exchange: Exchange) -> BodyReceiver:
        path = exchange.head.path
        is_stream = path in _STREAMS
        if is_stream or path == unary_rpcs.HEALTH_WATCH:
            method = partial(self._serve_counted, method)
        served, sleeps = partial(protocol.serve, method, call), is_stream and call.timeout_s is None
        try:
            return self._requests.start(exchange, served, is_stream=is_stream, dormant=sleeps)
        except NoMemory as error:
            return RefusedStream(error, exchange)

    async def _serve_counted(self, method: Method, call: CallHead, request: AsyncRequest) -> None:
        """Run a method that lasts as long as its client likes, counted as an open stream."""
        with self._streams.counted(request.exchange):
            await method(call, request)

    # ---- methods that await ---------------------------------------------------------------

    async def _serve_unary(self, call: CallHead, request: AsyncRequest, *, read_only: bool = False) -> None:
        """Serve a small call. If ``read_only``, its message may read settings but not change them."""
        path, exchange = request.head.path, request.exchange
        message = await protocol.small_message(call, request)
        if read_only and unary_rpcs.CHANGES[path](message):
            raise self._policy.refusal(METHODS[path], Verdict.REMOTE, GRPC_PREFIX)
        uid = client_uid(exchange) if path == unary_rpcs.SYSTEM_REGISTER else None
        protocol.send_message(exchange, await unary_rpcs.answer(path, self._service, message, uid))

    async def _serve_reflection(self, call: CallHead, request: AsyncRequest) -> None:
        exchange = request.exchange
        messages = protocol.small_messages(call, request, reflection.MAX_REQUEST_NBYTES)
        exchange.start(200, protocol.OK.headers)
        async for reply in reflection.replies(self._service, request.head.path, messages):
            exchange.send(protocol.frame(len(reply)) + reply)
            await exchange.room()
        exchange.finish(protocol.OK_TRAILERS)


class StreamingInference:
    """``ModelStreamInfer``: one ``InferStream`` a call, fed with requests by a second task."""

    def __init__(self, shared: InferenceContext, limit: RateLimit) -> None:
        self._limit = limit
        self._shared = shared
        self._service = shared.service
        self._heads = {coding: protocol.ok_head(coding).headers for coding in ("", *decoding.WINDOW_BITS)}

    async def serve(self, call: CallHead, request: AsyncRequest) -> None:
        """Answer the requests of one call until all are, or the client leaves. Raises its status."""
        shared, head = self._shared, request.head
        forwarded = None if shared.forwarding is None else shared.forwarding.parameters_of(head)
        traced = shared.receptions.deliver is not None
        reception = shared.receptions.of(head.headers, stream=True) if traced else None
        stream = InferStream(
            self._service,
            strict_errors=call.strict_errors,
            forwarded=forwarded,
            reception=reception,
            sender=request.exchange,
        )
        loop = asyncio.get_running_loop()

        def on_deadline(limit_s: float) -> None:  # at once, also for a client that does not read
            text = f"Deadline Exceeded: the stream did not end within its {limit_s:g} s"
            stream.fail(DeadlineExceeded(text))
            request.exchange.drop_unsent()

        reader = loop.create_task(self._read(call, request, stream, reception))
        timer, limit_s = None, call.timeout_s
        if limit_s is not None:
            timer = loop.call_later(limit_s, on_deadline, limit_s)
        try:
            await self._write(call.coding if shared.level else "", request.exchange, stream, reception)
        finally:
            if timer is not None:
                timer.cancel()
            reader.cancel()
            stream.cancel()
            stream.share.hold(0)
            if reception is not None:
                reception.close()

    async def _write(
        self, coding: str, exchange: Exchange, stream: InferStream, reception: Reception | None
    ) -> None:
        """Send answers as they come. An early status has no headers: proxies may retry such a call."""
        headers = self._heads[coding]
        async for pieces in stream.chunks():
            parts: Iterable[bytes]
            whole = pieces[0] if len(pieces) == 1 else None
            if coding and (nbytes := sum(map(len, pieces))) >= protocol.COMPRESSED_NBYTES:
                packed = await offload(nbytes, protocol.compress_messages, coding, self._shared.level, pieces)
                parts = protocol.join_pieces([packed])
            elif isinstance(whole, bytes):
                parts = (whole,)
            else:
                parts = protocol.join_pieces(pieces)
            if not exchange.started:
                exchange.start(200, headers)
            for part in parts:
                if stream.has_ended:  # the stream ended while waiting for room: its status follows at once
                    break
                if reception is not None:
                    reception.sending()
                exchange.send(part)
                if reception is not None:
                    reception.sent()
                await exchange.room()
        if not exchange.started:
            exchange.start(200, headers)
        exchange.finish(protocol.OK_TRAILERS)

    async def _read(
        self, call: CallHead, request: AsyncRequest, stream: InferStream, reception: Reception | None
    ) -> None:
        """Submit requests as they arrive, and detect that the client has left, even after the last."""
        try:
            unframer = protocol.Unframer(self._shared.max_request_nbytes, call.encoding)
            is_paid = True  # the call itself was rate-limited as its first request
            while (part := await request.part()) is not None:
                if reception is not None:
                    reception.read()
                for compressed, body in unframer.parts(part):
                    rates, exchange = self._limit.rates, request.exchange
                    if not is_paid and rates.is_on and (refusal := self._limit.refusal(exchange)) is not None:
                        is_long = compressed or len(body) > SHORT_NBYTES
                        stream.refuse(b"" if is_long else body, refusal)
                    else:
                        encoding, held_nbytes = call.encoding if compressed else "", unframer.unread_nbytes
                        await self._receive(encoding, request, stream, body, held_nbytes + len(body))
                    is_paid = False
                    del body
                    if stream.is_full:  # until a request completes; the client may leave earlier
                        stream.hold(unframer.unread_nbytes)
                        await request.wait_unless_gone(asyncio.ensure_future(stream.wait_for_room()))
                if unframer.unread_nbytes or len(part) > _UNCOUNTED_NBYTES or stream.share.nbytes:
                    stream.hold(unframer.unread_nbytes)
                if reception is not None:
                    reception.reading()
            unframer.finish()
            stream.end_requests()
            await request.wait_until_gone()
            stream.cancel()
        except ClientGone:
            stream.cancel()
        except Exception as error:
            # Drop the traceback, whose frames hold the request's bytes: the stream keeps the error.
            stream.fail(decoding.client_error(error, "reading a stream"))

    async def _receive(
        self,
        encoding: str,
        request: AsyncRequest,
        stream: InferStream,
        message: bytes | memoryview,
        held_nbytes: int,
    ) -> None:
        """Submit the request of a message. A long or compressed one is read in slices between other clients'
        work.

        Raises ClientGone, NoMemory, or RequestError if the message cannot be inflated, which ends the stream.
        """
        nbytes = len(message)
        if not encoding and nbytes < COLLECTED_NBYTES:
            if nbytes > _UNCOUNTED_NBYTES:  # the message is copied while it is parsed
                stream.hold(held_nbytes + nbytes)
            if nbytes < INGEST_NBYTES:
                stream.receive(message)
                return
            if (known := read_by_template(bytes(message))) is not None:
                stream.receive(message, known, nbytes)
                return
        stream.hold(held_nbytes)
        service = self._service
        share = Share(service.intake, request.exchange.endpoints.source)

        def claim(model_name: str, nbytes: int) -> Block | None:
            return service.inference.claim(model_name, nbytes, scanner.model_version)

        scanner = GrpcBodyScanner(claim, self._shared.max_request_nbytes, share, framed=False)
        parsing: asyncio.Future[InferRequest | RequestError] | None = None
        nbytes = 0
        try:
            async for part in self._parts(encoding, request, message):
                if not (nbytes or part.more):
                    stream.receive(part.data)
                    return
                nbytes += len(part.data)
                try:
                    scanner.feed(part.data)
                except NoMemory:
                    raise
                except RequestError as error:
                    stream.receive(scanner.header[:SHORT_NBYTES], error.with_traceback(None))
                    return
            parsing = asyncio.get_running_loop().create_future()
            header_nbytes = len(scanner.header) if len(scanner.header) > SHORT_NBYTES else 0
            parse_off_loop(header_nbytes, scanner.parse, parsing.set_result, service.json_executor)
            read = await asyncio.shield(parsing)
            if isinstance(read, InferRequest):
                share.hold(heap_nbytes(read))
                scanner.transfer_blocks()
            stream.receive(scanner.header[:SHORT_NBYTES], read, nbytes)
        finally:
            blocks = scanner.abort()

            def free() -> None:
                for block in blocks:
                    block.free()
                share.hold(0)

            if parsing is None or parsing.done():
                free()
            else:  # a thread still reads the blocks
                parsing.add_done_callback(lambda _: free())

    async def _parts(
        self, encoding: str, request: AsyncRequest, message: bytes | memoryview
    ) -> AsyncIterator[Slice]:
        """Yield a message part by part, inflated if it has an encoding. Other tasks run between parts."""
        if encoding:
            slices = decoding.Inflater(encoding, self._shared.inflation).slices(message, end=True)
        else:
            slices = _slices(message)
        found = Slice(b"", True)
        while found.more:
            await asyncio.sleep(0)
            if request.gone:
                raise ClientGone
            found = await offload(len(found.data or message) if encoding else 0, next, slices)
            yield found


def _slices(message: bytes | memoryview) -> Iterator[Slice]:
    for at in range(0, len(message), decoding.SLICE_NBYTES):
        yield Slice(message[at : at + decoding.SLICE_NBYTES], at + decoding.SLICE_NBYTES < len(message))
