"""The gRPC protocol server on grpc.aio, for users who need grpc's own features and for the conformance tests,
which compare it with our own transport. Only the transport differs; the handler of calls is the same.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from gpuserve.config.settings.server import NO_COMPRESSION
from gpuserve.config.settings.tls import TlsFiles
from gpuserve.front.net import exchange as net
from gpuserve.front.net.admission import source_of
from gpuserve.front.net.connection import AGE_GRACE_S
from gpuserve.front.net.exchange import AnswerHead, BodyReceiver, Header, Piece, Release, RequestHandler
from gpuserve.front.net.server import ProtocolServer
from gpuserve.front.protocols.access.authorization import UNIX, grpc_address
from gpuserve.front.protocols.grpc import grpc_protocol as protocol
from gpuserve.front.protocols.grpc.grpc_protocol import PREFIX_NBYTES

#: Compression levels as grpc numbers them.
_COMPRESSION_LEVELS: Final = {NO_COMPRESSION: 0, "low": 1, "medium": 2, "high": 3}
#: A client that does not complete its TLS handshake loses its connection after this time.
_HANDSHAKE_TIMEOUT_MS: Final = 10_000
#: Options of grpc are C ints.
_MAX_INT: Final = (1 << 31) - 1
#: Time for grpc's threads to send the last answers; they do not report when an answer has left.
_FLUSH_S: Final = 0.1


class GrpcAioServer(ProtocolServer):
    """A ``grpc.aio`` server in the front's event loop. Clients learn of a shutdown only when it happens."""

    def __init__(
        self,
        accept: RequestHandler,
        address: str,
        max_request_nbytes: int,
        compression: str = NO_COMPRESSION,
        certificates: GrpcCertificates | None = None,
        max_connection_age_s: float = 0.0,
        max_connections: int = _MAX_INT,
        idle_timeout_s: float = _MAX_INT,
    ) -> None:
        self._handler = _GenericHandler(accept)
        self._certificates = certificates
        self._address = address
        # grpc takes a C int; -1 means no limit.
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
        if max_connection_age_s:  # grpc adds 10 % itself
            self._options += [
                ("grpc.max_connection_age_ms", min(int(max_connection_age_s * 1000) or 1, _MAX_INT)),
                ("grpc.max_connection_age_grace_ms", int(AGE_GRACE_S * 1000)),
            ]
        self._server: Any = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=self._options)
        self._server.add_generic_rpc_handlers([self._handler])
        if self._certificates is None:
            self._server.add_insecure_port(self._address)
        else:
            self._server.add_secure_port(self._address, self._certificates.credentials())
        await self._server.start()

    async def renew(self) -> None:
        if self._certificates is not None:
            self._certificates.renew()

    async def stop(self) -> None:
        """Wait until the last answers have left. The end of the process closes the connections, so clients
        get UNAVAILABLE: grpc's own stop would cancel crossing calls, and clients never retry CANCELLED.
        """
        if self._server is not None:
            await asyncio.sleep(_FLUSH_S)


class _GenericHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All calls as streams of bytes in both directions: on the wire a unary call is the same."""

    def __init__(self, accept: RequestHandler) -> None:
        self._accept = accept

    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._serve, handler_call_details.method))

    async def _serve(self, path: str, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        exchange = GrpcAioExchange(path, context)
        sink = self._accept(exchange)
        if isinstance(sink, protocol.Refused):
            sink.receive_body(b"", True)  # nothing of the request is read; with grpc.aio that loses no status
        reading = asyncio.get_running_loop().create_task(exchange.read(messages, sink))
        try:
            async for reply in exchange.replies():
                yield reply
        finally:
            reading.cancel()
            exchange.close()
            sink.abandon()


# ---- one call ------------------------------------------------------------------------------------

_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
#: The part of a message passed to a receiver in one turn of the event loop, as the transport ``native`` reads
#: it.
_PART_NBYTES: Final = 256 << 10
#: Trailers that tell a client when to retry.
_RETRY_WHEN: Final = frozenset({protocol.RETRY_PUSHBACK[0], protocol.RETRY_AFTER})
#: The largest timeout that the digits of the header allow, in milliseconds: a day.
_MAX_TIMEOUT_MS: Final = 10**8 - 1


class GrpcAioExchange:
    """One call of grpc.aio as an ``Exchange``, which adds the message framing that grpc removes."""

    def __init__(self, path: str, context: Any) -> None:
        headers = [*_headers(context), net.TE, protocol.CONTENT_TYPE]
        self.head = net.Head("POST", path.encode(), headers, "2", None)
        address = grpc_address(context.peer())
        source = source_of(None if address == UNIX else address)
        self.endpoints = net.ConnectionEndpoints((address, 0), ("", 0), False, source=source)
        self.started = self.ended = False
        self._context = context
        self._unsent: deque[bytes] = deque()
        self._trailers: dict[bytes, bytes] = {}
        self._unused_nbytes = 0
        self._changed = asyncio.Event()

    # ---- called by the handler ------------------------------------------------------------

    def answer(
        self, head: AnswerHead, body: Sequence[Piece], nbytes: int, release: Release | None = None
    ) -> None:
        self.send(b"".join(body))
        if release is not None:
            release()
        self.finish(head.trailers)

    def start(self, status: int, headers: Iterable[Header], end: bool = False) -> None:
        self.started = True
        if end:
            self.finish(headers)

    def send(self, data: bytes, end: bool = False) -> None:
        self.started = True
        position = 0
        while position < len(data) and not self.ended:
            start = position + PREFIX_NBYTES
            position = start + int.from_bytes(data[position + 1 : start])
            self._unsent.append(data[start:position])
        self._changed.set()

    def finish(self, trailers: Iterable[Header] = ()) -> None:
        if not self.ended:
            self.ended = True
            self._trailers = dict(trailers)
            self._changed.set()

    def drop_unsent(self) -> None:
        if not self.ended:
            self._unsent.clear()
            self._changed.set()

    def reset(self) -> None:
        self.finish([(b"grpc-status", b"%d" % grpc.StatusCode.INTERNAL.value[0])])

    def consumed(self, nbytes: int) -> None:
        self._unused_nbytes -= nbytes
        self._changed.set()

    async def room(self) -> None:
        await self._wait_until(lambda: not self._unsent)
        if self.ended:
            raise ConnectionResetError("the client is gone")

    # ---- called by grpc -------------------------------------------------------------------

    async def read(self, messages: AsyncIterator[bytes], sink: BodyReceiver) -> None:
        """Pass the client's messages to a receiver, each once the message before it is consumed."""
        async for message in messages:
            self._unused_nbytes += PREFIX_NBYTES + len(message)
            sink.receive_body(protocol.frame(len(message)), False)
            for at in range(0, len(message), _PART_NBYTES):
                if at:
                    await asyncio.sleep(0)  # other clients run between two parts
                sink.receive_body(message[at : at + _PART_NBYTES], False)
            await self._wait_until(lambda: self._unused_nbytes <= 0)
        sink.receive_body(b"", True)

    async def replies(self) -> AsyncIterator[bytes]:
        """Yield the server's messages until the handler ends the call; then pass the status to grpc."""
        while self._unsent or not self.ended:
            await self._wait_until(lambda: bool(self._unsent) or self.ended)
            while self._unsent:
                yield self._unsent.popleft()
            self._changed.set()
        code = int(self._trailers[b"grpc-status"])
        if code:
            text = urllib.parse.unquote(self._trailers.get(b"grpc-message", b"").decode())
            given = [
                (key.decode(), value.decode()) for key, value in self._trailers.items() if key in _RETRY_WHEN
            ]
            await self._context.abort(_STATUS_CODES[code], text, tuple(given))

    def close(self) -> None:
        """Drop unsent messages, because the client has left."""
        self.ended = True
        self._unsent.clear()
        self._changed.set()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _headers(context: Any) -> list[Header]:
    """Return the metadata of a call as headers, without binary values, which nothing here reads."""
    given = context.invocation_metadata() or ()
    headers = [(name.encode(), value.encode()) for name, value in given if isinstance(value, str)]
    left_s = context.time_remaining()
    if left_s is not None:
        left_ms = min(max(int(left_s * 1000), 0), _MAX_TIMEOUT_MS)
        headers.append((b"grpc-timeout", b"%dm" % left_ms))
    return headers


# ---- certificates --------------------------------------------------------------------------------


class GrpcCertificates:
    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._renewed: Any = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for the server. Raise OSError if a file cannot be read."""
        return grpc.dynamic_ssl_server_credentials(
            self._read(), self._fetch, require_client_authentication=bool(self._files.client_ca)
        )

    def renew(self) -> None:
        """Read the files again. If that raises OSError, the old certificates stay in use."""
        self._renewed = self._read()

    def _fetch(self) -> Any:
        """Return the renewed certificates, or None if they are unchanged. Called in a thread of grpc."""
        renewed, self._renewed = self._renewed, None
        return renewed

    def _read(self) -> Any:
        files = self._files
        authorities = Path(files.client_ca).read_bytes() if files.client_ca else None
        pair = Path(files.keyfile).read_bytes(), Path(files.certfile).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)
