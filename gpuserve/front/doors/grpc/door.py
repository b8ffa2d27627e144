"""The gRPC door: what a call's head says about who may make it and what takes it, and the methods that await,
over an ``AwaitedRequest``. ``ModelInfer``, which awaits nothing, is in ``inference.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Final

from gpuserve.config.settings.server import NO_COMPRESSION
from gpuserve.core.errors import DeadlineExceeded, InvalidArgument, NoMemory, RequestError
from gpuserve.front.doors.access.endpoints import METHODS, Access
from gpuserve.front.doors.access.failures import error_to_tell
from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.access.inflation import SLICE_NBYTES, WINDOW_BITS, Inflater, Slice
from gpuserve.front.doors.access.offload import offload, result_of
from gpuserve.front.doors.access.peers import address_of, is_local
from gpuserve.front.doors.access.rate_limit import RateLimit
from gpuserve.front.doors.access.restrictions import GRPC_PREFIX, Policy, Verdict
from gpuserve.front.doors.access.users import user_of
from gpuserve.front.doors.grpc import health, reflection, rpcs
from gpuserve.front.doors.grpc.calls import (
    NO_TRAILERS,
    Method,
    Refused,
    RefusedStream,
    send_message,
    serve,
    small_message,
    small_messages,
)
from gpuserve.front.doors.grpc.framing import (
    COMPRESSED_NBYTES,
    LEVELS,
    Unframer,
    compress_messages,
    frame,
    joined,
)
from gpuserve.front.doors.grpc.headers import OK, OK_TRAILERS, CallHead, ok_head, read_call
from gpuserve.front.doors.grpc.inference import INGEST_NBYTES, GrpcInference, InferCall
from gpuserve.front.doors.grpc.ingest import GrpcBodyScanner
from gpuserve.front.doors.grpc.requests import SHORT_NBYTES
from gpuserve.front.doors.grpc.stream import CHUNK_NBYTES, InferStream
from gpuserve.front.exchange.awaited import AwaitedRequest, AwaitedRequests, ClientGone
from gpuserve.front.exchange.exchange import Accept, Exchange, Head, Piece, Sink
from gpuserve.front.exchange.limits import Admission, OpenStreams
from gpuserve.front.exchange.request_rates import RequestRates
from gpuserve.front.memory.blocks import heap_nbytes
from gpuserve.front.memory.intake import Share
from gpuserve.front.observe.tracing.reception import Reception
from gpuserve.front.service.service import InferenceService
from gpuserve.front.v2.strings import check_strings, has_long_strings
from gpuserve.front.v2.types import InferRequest
from gpuserve_worker.memory.arena import Block

#: Requests of a stream that come whole in so few bytes are not counted where nothing else of it is.
_UNCOUNTED_NBYTES: Final = 8 << 10
#: Their requests need not end before they are refused.
_STREAMS: Final = frozenset({rpcs.MODEL_STREAM_INFER, *reflection.METHODS})


class GrpcDoor:
    """Accepts the calls of gRPC; whatever goes wrong is a call's status. ``requests`` runs what awaits.
    ``compression`` is how far responses to inference are compressed, a word of the settings.
    """

    def __init__(
        self,
        service: InferenceService,
        requests: AwaitedRequests,
        max_request_nbytes: int,
        policy: Policy | None = None,
        forwarding: HeaderForwarding | None = None,
        compression: str = NO_COMPRESSION,
        streams: OpenStreams | None = None,
        limit: RateLimit | None = None,
    ) -> None:
        self._service = service
        self._streams = streams or Admission().streams
        self._requests = requests
        self._policy = policy or Policy()
        level = LEVELS[compression]
        self._inference = GrpcInference(service, max_request_nbytes, forwarding, level)
        service.health.watch(self._on_health)
        self._methods: dict[str, Method] = {
            rpcs.MODEL_STREAM_INFER: StreamingInference(
                self._inference, service, limit or RateLimit(RequestRates())
            ).serve,
            health.WATCH: self._health_watch,
            **dict.fromkeys(rpcs.UNARY, self._unary),
            **dict.fromkeys(reflection.METHODS, self._reflection),
            rpcs.SYSTEM_REGISTER: self._system_register,
        }

    def accept(self, exchange: Exchange) -> Sink:
        """The sink of a call. What its head says is worked out once for all heads that are equal."""
        head = exchange.head
        way: Accept | None = head.memo
        if way is None:
            way = head.memo = self._way_of(head)
        return way(exchange)

    def refuse(self, error: RequestError, exchange: Exchange) -> Sink:
        """Return the sink that answers a call with an error, whatever its messages say."""
        return (RefusedStream if exchange.head.path in _STREAMS else Refused)(error, exchange)

    def _way_of(self, head: Head) -> Accept:
        """What takes the calls that have this head."""
        access = METHODS.get(head.path)
        if access is None:
            return partial(Refused, rpcs.unimplemented(head.path))
        way = self._way_if_allowed(head)
        if self._policy.is_open(access):
            return way
        verdict = self._policy.judge(access, head.headers, is_local=False, prefix=GRPC_PREFIX)
        if verdict is Verdict.ALLOWED:
            return way
        refusal = self._policy.refusal(access, verdict, GRPC_PREFIX)
        refused = partial(RefusedStream if head.path in _STREAMS else Refused, refusal)
        if verdict is Verdict.NO_TOKEN:
            return refused
        if verdict is Verdict.READ_ONLY:
            reads = partial(self._begin, self._read_only, read_call(head)) if head.trailers else way
            return partial(self._by_locality, access, way, reads)
        return partial(self._by_locality, access, way, refused)

    def _way_if_allowed(self, head: Head) -> Accept:
        call = read_call(head)
        if not head.trailers:
            return partial(Refused, InvalidArgument(NO_TRAILERS))
        if head.path == rpcs.MODEL_INFER:
            return partial(InferCall, self._inference, call)
        return partial(self._begin, self._methods[head.path], call)

    def _by_locality(self, access: Access, local: Accept, remote: Accept, exchange: Exchange) -> Sink:
        """A call that is for clients on this machine, whatever else ``remote`` makes of it."""
        is_here = is_local(address_of(exchange.ends), exchange.head.headers)
        return (local if is_here else remote)(exchange)

    def _on_health(self) -> None:
        if self._service.health.draining or self._service.health.ended:
            self._requests.wake_all()

    def _begin(self, method: Method, call: CallHead, exchange: Exchange) -> Sink:
        path = exchange.head.path
        is_stream = path in _STREAMS
        if is_stream or path == health.WATCH:
            method = partial(self._counted, method)
        served, sleeps = partial(serve, method, call), is_stream and call.timeout_s is None
        try:
            return self._requests.begin(exchange, served, is_stream=is_stream, sleeps=sleeps)
        except NoMemory as error:
            return RefusedStream(error, exchange)

    async def _counted(self, method: Method, call: CallHead, request: AwaitedRequest) -> None:
        """A method that lasts as long as its client likes."""
        with self._streams.counted(request.exchange):
            await method(call, request)

    # ---- methods that await ---------------------------------------------------------------

    async def _unary(self, call: CallHead, request: AwaitedRequest) -> None:
        await self._answer(request, await small_message(call, request))

    async def _system_register(self, call: CallHead, request: AwaitedRequest) -> None:
        message = await small_message(call, request)
        reply = rpcs.system_register(self._service, message, user_of(request.exchange))
        send_message(request.exchange, reply)

    async def _read_only(self, call: CallHead, request: AwaitedRequest) -> None:
        """A call that may read settings and not change them, as its message says."""
        path = request.head.path
        message = await small_message(call, request)
        if rpcs.CHANGES[path](message):
            raise self._policy.refusal(METHODS[path], Verdict.REMOTE, GRPC_PREFIX)
        await self._answer(request, message)

    async def _answer(self, request: AwaitedRequest, message: bytes) -> None:
        reply = await rpcs.answer(request.head.path, self._service, message)
        send_message(request.exchange, reply)

    async def _health_watch(self, call: CallHead, request: AwaitedRequest) -> None:
        await health.serve_watch(self._service.health, call, request)

    async def _reflection(self, call: CallHead, request: AwaitedRequest) -> None:
        exchange = request.exchange
        replies = reflection.replies(
            self._service, request.head.path, small_messages(call, request, reflection.MAX_REQUEST_NBYTES)
        )
        exchange.start(200, OK.headers)
        async for reply in replies:
            exchange.send(frame(len(reply)) + reply)
            await exchange.room()
        exchange.finish(OK_TRAILERS)


class StreamingInference:
    """``ModelStreamInfer``: one ``InferStream`` a call, which a second task feeds with requests."""

    def __init__(self, shared: GrpcInference, service: InferenceService, limit: RateLimit) -> None:
        self._limit = limit
        self._shared = shared
        self._service = service
        self._heads = {coding: ok_head(coding).headers for coding in ("", *WINDOW_BITS)}

    async def serve(self, call: CallHead, request: AwaitedRequest) -> None:
        """Answer the requests of one call, until all are or its client leaves; RequestError is its status."""
        shared, head = self._shared, request.head
        forwarded = None if shared.forwarding is None else shared.forwarding.of(head)
        reception = (
            None if shared.receptions.deliver is None else shared.receptions.of(head.headers, stream=True)
        )
        stream = InferStream(
            self._service,
            strict_errors=call.strict_errors,
            forwarded=forwarded,
            reception=reception,
            sender=request.exchange,
        )
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read(call, request, stream, reception))
        timer = None
        if call.timeout_s is not None:
            timer = loop.call_later(call.timeout_s, _end_late, stream, request.exchange, call.timeout_s)
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
        """Send answers as they come. Before any, a status stands alone: proxies may repeat such a call."""
        headers = self._heads[coding]
        async for pieces in stream.chunks():
            parts: Iterable[bytes]
            whole = pieces[0] if len(pieces) == 1 else None
            if coding and (nbytes := sum(map(len, pieces))) >= COMPRESSED_NBYTES:
                packed = await offload(nbytes, _compressed, coding, self._shared.level, pieces)
                parts = joined([packed], CHUNK_NBYTES)
            elif isinstance(whole, bytes):
                parts = (whole,)
            else:
                parts = joined(pieces, CHUNK_NBYTES)
            if not exchange.started:
                exchange.start(200, headers)
            for part in parts:
                if stream.has_ended:  # while it waited for room: its status follows at once
                    break
                if reception is not None:
                    reception.sending()
                exchange.send(part)
                if reception is not None:
                    reception.sent()
                await exchange.room()
        if not exchange.started:
            exchange.start(200, headers)
        exchange.finish(OK_TRAILERS)

    async def _read(
        self, call: CallHead, request: AwaitedRequest, stream: InferStream, reception: Reception | None
    ) -> None:
        """Hand the requests on as they come, and notice when the client goes away, also after the last."""
        try:
            unframer = Unframer(self._shared.max_request_nbytes, call.encoding)
            is_paid = True  # the call itself was counted as its first request
            while (part := await request.part()) is not None:
                if reception is not None:
                    reception.read()
                for compressed, body in unframer.parts(part):
                    rates, exchange = self._limit.rates, request.exchange
                    if not is_paid and rates.is_on and (refusal := self._limit.refusal(exchange)) is not None:
                        is_long = compressed or len(body) > SHORT_NBYTES
                        stream.refuse(b"" if is_long else body, refusal)
                    else:
                        await self._take(call, request, stream, compressed, body, unframer.unread_nbytes)
                    is_paid = False
                    del body
                    if stream.is_full:  # it may be so until a request is through, and the client leave before
                        stream.hold(unframer.unread_nbytes)
                        await request.unless_gone(asyncio.ensure_future(stream.wait_for_room()))
                if unframer.unread_nbytes or len(part) > _UNCOUNTED_NBYTES or stream.share.nbytes:
                    stream.hold(unframer.unread_nbytes)
                if reception is not None:
                    reception.reading()
            unframer.finish()
            stream.close_requests()
            await request.until_gone()
            stream.cancel()
        except ClientGone:
            stream.cancel()
        except Exception as error:
            # Without what it came through, which holds the request's bytes, and would be held by the stream.
            stream.fail(error_to_tell(error, "reading a stream"))

    async def _take(
        self,
        call: CallHead,
        request: AwaitedRequest,
        stream: InferStream,
        compressed: bool,
        body: bytes | memoryview,
        unread_nbytes: int,
    ) -> None:
        if compressed or len(body) >= INGEST_NBYTES:
            stream.hold(unread_nbytes + len(body))
            await self._take_long(call.encoding if compressed else "", request, stream, body)
        else:
            if len(body) > _UNCOUNTED_NBYTES:  # it is copied while it is read
                stream.hold(unread_nbytes + 2 * len(body))
            stream.take(body)

    async def _take_long(
        self, encoding: str, request: AwaitedRequest, stream: InferStream, message: bytes | memoryview
    ) -> None:
        """Read a long or compressed message in turns with other clients, and have its request submitted.

        Raises ClientGone if the client has left meanwhile, NoMemory if there is none for the message, and
        RequestError if it cannot be inflated, which ends the stream.
        """
        service = self._service
        share = Share(service.intake, request.exchange.ends.source)

        def claim(model_name: str, nbytes: int) -> Block | None:
            return service.inference.claim(model_name, nbytes, scanner.model_version)

        scanner = GrpcBodyScanner(claim, self._shared.max_request_nbytes, share, framed=False)
        parsing: asyncio.Future[InferRequest | RequestError] | None = None
        nbytes = 0
        try:
            async for part in self._parts(encoding, request, message):
                if not (nbytes or part.more):
                    stream.take(part.data)
                    return
                nbytes += len(part.data)
                try:
                    scanner.feed(part.data)
                except NoMemory:
                    raise
                except RequestError as error:
                    stream.take(scanner.header[:SHORT_NBYTES], error.with_traceback(None))
                    return
            parsing = self._parse(scanner)
            read = await asyncio.shield(parsing)
            if isinstance(read, InferRequest):
                share.hold(heap_nbytes(read))
                scanner.hand_over()
            stream.take(scanner.header[:SHORT_NBYTES], read, nbytes)
        finally:
            free = partial(_free, scanner.abort(), share)
            if parsing is None or parsing.done():
                free()
            else:  # a thread still reads them
                parsing.add_done_callback(lambda _: free())

    async def _parts(
        self, encoding: str, request: AwaitedRequest, message: bytes | memoryview
    ) -> AsyncIterator[Slice]:
        """Yield a message part by part, inflated if it has an encoding; other clients have turns between."""
        if encoding:
            slices = Inflater(encoding, self._shared.inflation).slices(message, end=True)
        else:
            slices = _slices(message)
        found = Slice(b"", True)
        while found.more:
            await asyncio.sleep(0)
            if request.gone:
                raise ClientGone
            found = await offload(len(found.data or message) if encoding else 0, next, slices)
            yield found

    def _parse(self, scanner: GrpcBodyScanner) -> asyncio.Future[InferRequest | RequestError]:
        """Parse a message that has been read; a thread does that if it takes long."""
        loop, executor = asyncio.get_running_loop(), self._service.json_executor
        if len(scanner.header) > SHORT_NBYTES:
            return loop.run_in_executor(executor, result_of, lambda: check_strings(scanner.parse()))
        read = result_of(scanner.parse)
        if isinstance(read, InferRequest) and has_long_strings(read):
            return loop.run_in_executor(executor, result_of, lambda: check_strings(read))
        parsed: asyncio.Future[InferRequest | RequestError] = loop.create_future()
        parsed.set_result(read)
        return parsed


def _compressed(coding: str, level: int, pieces: list[Piece]) -> bytes:
    return compress_messages(coding, level, b"".join(pieces))


def _free(blocks: list[Block], share: Share) -> None:
    for block in blocks:
        block.free()
    share.hold(0)


def _slices(message: bytes | memoryview) -> Iterator[Slice]:
    for at in range(0, len(message), SLICE_NBYTES):
        yield Slice(message[at : at + SLICE_NBYTES], at + SLICE_NBYTES < len(message))


def _end_late(stream: InferStream, exchange: Exchange, timeout_s: float) -> None:
    """Tell a client that its time is over, also one that does not read: its status waits for nothing."""
    stream.fail(DeadlineExceeded(f"Deadline Exceeded: the stream did not end within its {timeout_s:g} s"))
    exchange.drop_unsent()
