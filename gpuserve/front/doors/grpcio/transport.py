"""The gRPC door on grpc.aio, for users who need grpc's own features, and as the oracle of the
conformance tests. The same service, codec and RPC table as our own door; only the carrier differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc

from gpuserve.front.doors.access.forwarding import HeaderForwarding
from gpuserve.front.doors.access.restrictions import Policy
from gpuserve.front.doors.grpc import health, reflection, requests, responses, rpcs
from gpuserve.front.doors.grpc.framing import PREFIX_NBYTES
from gpuserve.front.doors.grpc.headers import STRICT_ERRORS, limit_time
from gpuserve.front.doors.grpc.stream import InferStream
from gpuserve.front.doors.grpcio.certificates import GrpcCertificates
from gpuserve.front.doors.grpcio.guard import Guard
from gpuserve.front.doors.grpcio.status import as_status
from gpuserve.front.exchange.connection import AGE_GRACE_S
from gpuserve.front.observe.tracing.reception import Reception
from gpuserve.front.service.service import InferenceService
from gpuserve.settings.server import NO_COMPRESSION

#: As grpc numbers them.
_COMPRESSION_LEVELS: Final = {NO_COMPRESSION: 0, "low": 1, "medium": 2, "high": 3}
#: A client that does not get on with its TLS handshake keeps no connection for longer.
_HANDSHAKE_TIMEOUT_MS: Final = 10_000
#: Options of grpc are C ints.
_MAX_INT: Final = (1 << 31) - 1
#: What was answered last is with grpc's threads by then; they do not say when it has left.
_LAST_WORDS_S: Final = 0.1


class GrpcAioTransport:
    """A ``grpc.aio`` server on one address. Runs in the front's event loop."""

    def __init__(
        self,
        service: InferenceService,
        address: str,
        max_request_nbytes: int,
        forwarding: HeaderForwarding | None = None,
        policy: Policy | None = None,
        compression: str = NO_COMPRESSION,
        certificates: GrpcCertificates | None = None,
        max_connection_age_s: float = 0.0,
    ) -> None:
        self._methods = _Methods(service, forwarding)
        self._guard = Guard(self._methods, policy or Policy())
        self._certificates = certificates
        self._address = address
        # grpc takes a C int; -1 is without a limit.
        limit = max_request_nbytes if max_request_nbytes < 1 << 31 else -1
        self._options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", -1),
            ("grpc.default_compression_level", _COMPRESSION_LEVELS[compression]),
            ("grpc.so_reuseport", 1),  # beside the supervisor's socket, which only reserves the port
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ]
        if max_connection_age_s:  # grpc adds the 10 % itself
            self._options += [
                ("grpc.max_connection_age_ms", min(int(max_connection_age_s * 1000) or 1, _MAX_INT)),
                ("grpc.max_connection_age_grace_ms", int(AGE_GRACE_S * 1000)),
            ]
        self._server: Any = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=self._options)
        self._server.add_generic_rpc_handlers([self._guard])
        if self._certificates is None:
            self._server.add_insecure_port(self._address)
        else:
            self._server.add_secure_port(self._address, self._certificates.credentials())
        await self._server.start()

    def announce(self) -> None:
        """grpc tells its clients when it is shut down, not before."""

    @property
    def n_unaware(self) -> int:
        """No client is told, so there is none that has not heard of it."""
        return 0

    @property
    def n_held(self) -> int:
        """It is not known which connection has which."""
        return 0

    def limit_age(self, max_age_s: float) -> None:
        """Its connections keep what they were made with."""

    async def renew(self) -> None:
        """Use the files of TLS anew, for connections from now on."""
        if self._certificates is not None:
            self._certificates.renew()

    async def stop(self) -> None:
        """Let the last answers leave; in-flight requests were finished before.

        The connections are closed by the end of the process. grpc's own way to stop cancels calls that cross
        its word to the clients: they get CANCELLED, which nobody tries again. By a closed connection they get
        UNAVAILABLE.
        """
        if self._server is not None:
            await asyncio.sleep(_LAST_WORDS_S)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Method path -> how it is run. Bodies stay bytes: the codec reads them."""

    def __init__(self, service: InferenceService, forwarding: HeaderForwarding | None) -> None:
        self._service = service
        self._receptions = service.control.trace.receptions
        self._forwarding = forwarding

    def service(self, handler_call_details: Any) -> Any:
        """The method of a call; None is answered with UNIMPLEMENTED by grpc."""
        path = handler_call_details.method
        if path == rpcs.MODEL_INFER:
            return grpc.unary_unary_rpc_method_handler(self._infer)
        if path == rpcs.MODEL_STREAM_INFER:
            return grpc.stream_stream_rpc_method_handler(self._stream_infer)
        if path == health.WATCH:
            return grpc.unary_stream_rpc_method_handler(self._health_watch)
        if path in reflection.METHODS:
            return grpc.stream_stream_rpc_method_handler(functools.partial(self._reflection, path))
        if path not in rpcs.UNARY:
            return None

        async def unary(body: bytes, context: Any) -> bytes:
            async with as_status(context):
                return await rpcs.answer(path, self._service, body)

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _infer(self, body: bytes, context: Any) -> bytes:
        headers = list(_headers(context))
        reception = self._receptions.of(headers)
        async with as_status(context), _until_sent(reception):
            request = requests.parse_infer_request(body)
            request.reception = reception
            if self._forwarding is not None:
                self._forwarding.add_to(request, headers)
            limit_time(request, context.time_remaining())
            response = await self._service.inference.infer(request)
            try:
                return b"".join(responses.encode_infer_response(response))
            finally:
                response.close()

    async def _stream_infer(self, bodies: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        # grpc.aio cancels this coroutine when the client goes away or its time is up.
        metadata, headers = dict(context.invocation_metadata() or ()), list(_headers(context))
        async with as_status(context):
            forwarded = None if self._forwarding is None else self._forwarding.parameters(headers)
        strict_errors = metadata.get(STRICT_ERRORS) == "true"
        reception = self._receptions.of(headers, stream=True)
        stream = InferStream(
            self._service, strict_errors=strict_errors, forwarded=forwarded, reception=reception
        )
        reader = asyncio.get_running_loop().create_task(_read_stream(bodies, stream, reception))
        try:
            async with as_status(context):
                async for chunk in stream.chunks():
                    if reception is not None:
                        reception.sending()
                    for message in _messages(chunk):
                        yield message
                    if reception is not None:
                        reception.sent()
        finally:
            reader.cancel()
            stream.cancel()
            if reception is not None:
                reception.close()

    async def _health_watch(self, body: bytes, context: Any) -> AsyncIterator[bytes]:
        # grpc.aio cancels this coroutine when the client goes away; nothing else ends it.
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with as_status(context):
            name = health.service_of(body)
            async for reply in health.changes(self._service.health, name, gone):
                yield reply

    async def _reflection(
        self, path: str, bodies: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        async with as_status(context):
            async for reply in reflection.replies(self._service, path, bodies):
                yield reply


@contextlib.asynccontextmanager
async def _until_sent(reception: Reception | None) -> AsyncIterator[None]:
    """Note the end of a unary method. grpc.aio sends after it, so the end of that is not seen."""
    try:
        yield
        if reception is not None:
            reception.sending()
            reception.sent()
    finally:
        if reception is not None:
            reception.close()


async def _read_stream(
    bodies: AsyncIterator[bytes], stream: InferStream, reception: Reception | None
) -> None:
    async for body in bodies:
        if reception is not None:
            reception.read()
        stream.take(body)
        await stream.wait_for_room()
        if reception is not None:
            reception.reading()
    stream.close_requests()


def _headers(context: Any) -> Iterator[tuple[bytes, bytes]]:
    """The metadata of a call, as the headers that carried it; binary values are in no header we read."""
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            yield name.encode(), value.encode()


def _messages(chunk: bytes) -> Iterator[bytes]:
    """The messages of a chunk without their framing, which grpc does itself."""
    position = 0
    while position < len(chunk):
        start = position + PREFIX_NBYTES
        position = start + int.from_bytes(chunk[position + 1 : start])
        yield chunk[start:position]
