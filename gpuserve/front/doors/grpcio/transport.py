"""The gRPC door on grpc.aio, for users who need grpc's own features, and as the second opinion of the
conformance tests. The very same door as on our own server; only the carrier differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import grpc

from gpuserve.config.settings.server import NO_COMPRESSION
from gpuserve.front.doors.grpc.calls import Refused
from gpuserve.front.doors.grpcio.certificates import GrpcCertificates
from gpuserve.front.doors.grpcio.exchange import GrpcAioExchange
from gpuserve.front.exchange.connection import AGE_GRACE_S
from gpuserve.front.exchange.exchange import Accept
from gpuserve.front.exchange.transport import Transport

#: As grpc numbers them.
_COMPRESSION_LEVELS: Final = {NO_COMPRESSION: 0, "low": 1, "medium": 2, "high": 3}
#: A client that does not get on with its TLS handshake keeps no connection for longer.
_HANDSHAKE_TIMEOUT_MS: Final = 10_000
#: Options of grpc are C ints.
_MAX_INT: Final = (1 << 31) - 1
#: What was answered last is with grpc's threads by then; they do not say when it has left.
_LAST_WORDS_S: Final = 0.1


class GrpcAioTransport(Transport):
    """A ``grpc.aio`` server in the front's loop; its clients are told of a shutdown only when it happens."""

    def __init__(
        self,
        accept: Accept,
        address: str,
        max_request_nbytes: int,
        compression: str = NO_COMPRESSION,
        certificates: GrpcCertificates | None = None,
        max_connection_age_s: float = 0.0,
        max_connections: int = _MAX_INT,
        idle_timeout_s: float = _MAX_INT,
    ) -> None:
        self._calls = _Calls(accept)
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
            ("grpc.max_allowed_incoming_connections", min(max_connections, _MAX_INT)),
            ("grpc.max_connection_idle_ms", int(min(idle_timeout_s * 1000, _MAX_INT))),
        ]
        if max_connection_age_s:  # grpc adds the 10 % itself
            self._options += [
                ("grpc.max_connection_age_ms", min(int(max_connection_age_s * 1000) or 1, _MAX_INT)),
                ("grpc.max_connection_age_grace_ms", int(AGE_GRACE_S * 1000)),
            ]
        self._server: Any = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=self._options)
        self._server.add_generic_rpc_handlers([self._calls])
        if self._certificates is None:
            self._server.add_insecure_port(self._address)
        else:
            self._server.add_secure_port(self._address, self._certificates.credentials())
        await self._server.start()

    async def renew(self) -> None:
        if self._certificates is not None:
            self._certificates.renew()

    async def stop(self) -> None:
        """Let the last answers leave. The end of the process closes connections, so that clients get
        UNAVAILABLE; grpc's own stop cancels crossing calls, and CANCELLED is never tried again.
        """
        if self._server is not None:
            await asyncio.sleep(_LAST_WORDS_S)


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every call of whatever method, as a stream of bytes either way: on the wire a unary one is no other."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept

    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._serve, handler_call_details.method))

    async def _serve(self, path: str, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Cancelled by grpc when the client goes away or its time is up."""
        exchange = GrpcAioExchange(path, context)
        sink = self._accept(exchange)
        if isinstance(sink, Refused):
            sink.take(b"", True)  # nothing of the request is read; here no status is lost by that
        reading = asyncio.get_running_loop().create_task(exchange.read(messages, sink))
        try:
            async for reply in exchange.replies():
                yield reply
        finally:
            reading.cancel()
            exchange.give_up()
            sink.abandon()
