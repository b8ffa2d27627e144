"""gRPC over HTTP without any method: message framing and compression, call headers, status trailers, and the
common parts of calls that await or are refused.

A gRPC message follows a prefix of five bytes: a flag that says whether the message is compressed, and the
message length as a big-endian ``uint32``. The framing functions are pure.
"""

from __future__ import annotations

import asyncio
import math
import struct
import urllib.parse
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from gpuserve.core import errors
from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.net.async_requests import AsyncRequest
from gpuserve.front.net.exchange import AnswerHead, Exchange, Head, Piece, grpc_timeout_s
from gpuserve.front.net.request_rate_limiter import retry_after_s
from gpuserve.front.protocols.access.body_decoding import WINDOW_BITS, Buffer, client_error, inflate
from gpuserve.front.requests.limits import InflationLimits
from gpuserve.front.requests.server_status import STATUS

PREFIX_NBYTES: Final = 5
IDENTITY: Final = "identity"
#: The value of the ``grpc-accept-encoding`` header that the server answers with.
ACCEPTED_ENCODINGS: Final = "identity, deflate, gzip"
PREFIX: Final = struct.Struct(">BI")
#: Messages are written in chunks of about this size.
CHUNK_NBYTES: Final = 1 << 20
#: Messages up to this size are copied out of the chunks that contained them.
_COPIED_NBYTES: Final = 1 << 20
#: The inflation ratio allowed for small messages, which are limited by size alone.
_ANY_RATIO: Final = 1 << 20
#: Compression level in the settings -> zlib level; 0 is no compression.
LEVELS: Final[dict[str, int]] = {"none": 0, "low": 1, "medium": 6, "high": 9}
#: Shorter messages are not compressed: they are one packet either way, and shrink by less than a tenth.
COMPRESSED_NBYTES: Final = 1024


def frame(nbytes: int) -> bytes:
    """Return the five prefix bytes of an uncompressed message of ``nbytes``."""
    return PREFIX.pack(0, nbytes)


def read_prefix(
    data: Buffer, limit_nbytes: int, encoding: str = IDENTITY, position: int = 0
) -> tuple[bool, int]:
    """Return (compressed, nbytes); raise InvalidArgument for the flag, ResourceExhausted for the size."""
    flag, nbytes = PREFIX.unpack_from(data, position)
    if flag > 1:
        raise InvalidArgument(f"a gRPC message starts with a flag of 0 or 1, got {flag}")
    if flag and encoding == IDENTITY:
        raise InvalidArgument(
            "a gRPC message is marked as compressed, but the call names no grpc-encoding: "
            "expected gzip or deflate"
        )
    if nbytes > limit_nbytes:
        raise ResourceExhausted(f"a request of {nbytes} bytes is over the limit of {limit_nbytes} bytes")
    return bool(flag), nbytes


def check_encoding(encoding: str) -> str:
    """Return the message encoding of a call. Raise Unimplemented if the server cannot decode it."""
    encoding = encoding or IDENTITY
    if encoding != IDENTITY and encoding not in WINDOW_BITS:
        raise errors.Unimplemented(
            f"grpc-encoding '{encoding[:64]}' is not supported, expected one of {ACCEPTED_ENCODINGS}"
        )
    return encoding


def unary_message(body: Buffer, limit_nbytes: int, encoding: str = "") -> Buffer:
    """Return the message of a complete body, copied only if compressed. Raises as ``unary_part``."""
    compressed, message = unary_part(body, limit_nbytes, encoding)
    return inflate(message, encoding, InflationLimits(limit_nbytes, _ANY_RATIO)) if compressed else message


def unary_part(body: Buffer, limit_nbytes: int, encoding: str = "") -> tuple[bool, Buffer]:
    """Return (compressed, message) of a body. Raises InvalidArgument if it does not hold exactly one message,
    ResourceExhausted if the message is too large, and Unimplemented if the encoding is unknown.
    """
    encoding = check_encoding(encoding)
    if len(body) < PREFIX_NBYTES:
        raise truncated_body_error(len(body), PREFIX_NBYTES)
    compressed, nbytes = read_prefix(body, limit_nbytes, encoding)
    if len(body) < PREFIX_NBYTES + nbytes:
        raise truncated_body_error(len(body), PREFIX_NBYTES + nbytes)
    if len(body) > PREFIX_NBYTES + nbytes:
        raise oversized_body_error()
    return compressed, memoryview(body)[PREFIX_NBYTES:]


class Unframer:
    """A splitter of a chunked body into messages. Raises Unimplemented for an unknown encoding."""

    def __init__(self, limit_nbytes: int, encoding: str = "") -> None:
        self._limit_nbytes = limit_nbytes
        self._encoding = check_encoding(encoding)
        #: Bytes of incomplete or unrequested messages, valid from ``_position`` on.
        self._data: bytes | bytearray = b""
        self._position = 0

    @property
    def unread_nbytes(self) -> int:
        return len(self._data) - self._position

    def feed(self, chunk: Buffer) -> list[bytes]:
        return list(self.messages(chunk))

    def messages(self, chunk: Buffer) -> Iterator[bytes]:
        """Yield the small messages that a chunk completes, inflated one at a time. Raises as ``parts``."""
        limits = InflationLimits(self._limit_nbytes, _ANY_RATIO)
        for compressed, message in self.parts(chunk):
            yield inflate(message, self._encoding, limits) if compressed else bytes(message)

    def parts(self, chunk: Buffer) -> Iterator[tuple[bool, bytes | memoryview]]:
        """Yield (compressed, message) for each complete message.

        Raises InvalidArgument for a bad prefix and ResourceExhausted if a message is too large. A long
        message that arrived in several chunks is not copied."""
        self._buffer(chunk)
        while self.unread_nbytes >= PREFIX_NBYTES:
            data, start = self._data, self._position + PREFIX_NBYTES
            compressed, nbytes = read_prefix(data, self._limit_nbytes, self._encoding, self._position)
            if len(data) < start + nbytes:
                break
            end = start + nbytes
            if type(data) is bytes:
                self._position = end
                if end == len(data):
                    self._data, self._position = b"", 0
                yield compressed, data[start:end]
            else:
                del data  # otherwise the buffer would live as long as the consumer works on the message
                yield compressed, self._cut_message(start, end)

    def _cut_message(self, start: int, end: int) -> bytes | memoryview:
        view = memoryview(self._data)
        if end - start > _COPIED_NBYTES:
            self._data, self._position = bytes(view[end:]), 0
            return view[start:end]
        message = bytes(view[start:end])
        view.release()
        self._position = end
        if end == len(self._data):
            self._data, self._position = b"", 0
        return message

    def _buffer(self, chunk: Buffer) -> None:
        """Buffer a chunk. Chunks are joined only when a message spans them, which is rare."""
        if not self._data:
            self._data = bytes(chunk)
            return
        if type(self._data) is bytes:
            self._data = bytearray(memoryview(self._data)[self._position :])
        else:
            del self._data[: self._position]  # type: ignore[union-attr]
        self._position = 0
        self._data += chunk

    def finish(self) -> None:
        """Raise InvalidArgument if the body ended in the middle of a message."""
        if given := self.unread_nbytes:
            expected = PREFIX_NBYTES
            if given >= PREFIX_NBYTES:
                expected += PREFIX.unpack_from(self._data, self._position)[1]
            raise truncated_body_error(given, expected)


def join_pieces(pieces: Sequence[Buffer]) -> Iterator[bytes]:
    """Yield pieces joined into parts of at most ``CHUNK_NBYTES``; longer pieces are cut lazily."""
    parts: list[Buffer] = []
    room = CHUNK_NBYTES
    for piece in pieces:
        for at in range(0, len(piece), CHUNK_NBYTES):
            part = piece if len(piece) <= CHUNK_NBYTES else memoryview(piece)[at : at + CHUNK_NBYTES]
            if len(part) > room:
                yield b"".join(parts)
                parts, room = [], CHUNK_NBYTES
            parts.append(part)
            room -= len(part)
    if parts:
        yield b"".join(parts)


def compress_messages(coding: str, level: int, pieces: Iterable[Buffer]) -> bytes:
    """Return framed messages, each compressed unless it is short or would not become smaller."""
    parts: list[bytes] = []
    position, framed = 0, memoryview(b"".join(pieces))
    while position < len(framed):
        end = position + PREFIX_NBYTES + PREFIX.unpack_from(framed, position)[1]
        parts.append(_compress_message(coding, level, framed[position:end]))
        position = end
    return b"".join(parts)


def _compress_message(coding: str, level: int, framed: memoryview) -> bytes:
    message = framed[PREFIX_NBYTES:]
    if len(message) < COMPRESSED_NBYTES:
        return bytes(framed)
    compressor = zlib.compressobj(level, zlib.DEFLATED, WINDOW_BITS[coding])
    packed = compressor.compress(message) + compressor.flush()
    return PREFIX.pack(1, len(packed)) + packed if len(packed) < len(message) else bytes(framed)


def truncated_body_error(given: int, expected: int) -> InvalidArgument:
    return InvalidArgument(f"the request body is truncated: expected {expected} bytes, got {given}")


def oversized_body_error() -> InvalidArgument:
    return InvalidArgument("the request body goes on after its message: expected exactly one in a unary call")


# ---- headers, trailers and status ----------------------------------------------------------------

CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
ACCEPT_ENCODING: Final = (b"grpc-accept-encoding", ACCEPTED_ENCODINGS.replace(" ", "").encode())
#: Headers before the messages of a successful call, and trailers after them.
OK_HEADERS: Final = [CONTENT_TYPE, ACCEPT_ENCODING]
OK_TRAILERS: Final = [(b"grpc-status", b"0")]
#: Tells retrying clients to wait a moment, after which they know which servers are left (gRPC proposal A6).
RETRY_PUSHBACK: Final = (b"grpc-retry-pushback-ms", b"100")
#: The same delay in whole seconds under HTTP's name, which every client library shows.
RETRY_AFTER: Final = b"retry-after"
#: If this header is "true", the first error of a stream becomes the status of the call.
STRICT_ERRORS: Final = b"triton_grpc_error"
#: Codings of responses by preference. Every client has gzip.
_PREFERENCE: Final = ("gzip", "deflate")
#: Limit of an encoded ``grpc-message``. Clients refuse calls whose headers, with the status, exceed 8 KiB.
MAX_MESSAGE_NBYTES: Final = 7 << 10
_UNQUOTED: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


class CallHead(NamedTuple):
    """The call headers: message ``encoding`` ("" is identity), response ``coding`` ("" if the client accepts
    none of ours), and ``strict_errors``: whether the first error of a stream becomes its status.
    """

    encoding: str
    coding: str
    timeout_s: float | None
    strict_errors: bool


def parse_call_head(head: Head) -> CallHead:
    headers: dict[bytes, bytes] = dict(head.headers)
    encoding = headers.get(b"grpc-encoding", b"identity").decode("latin-1")
    return CallHead(
        "" if encoding == IDENTITY else encoding,
        response_coding(head.headers),
        grpc_timeout_s(head.headers),
        headers.get(STRICT_ERRORS) == b"true",
    )


def response_coding(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the compression coding for responses to this client, or "" if it accepts none of ours."""
    accepted: set[str] = set()
    for name, value in headers:
        if name == ACCEPT_ENCODING[0]:
            accepted.update(one.strip() for one in value.decode("latin-1").split(","))
    return next((one for one in _PREFERENCE if one in accepted), "")


def ok_head(coding: str = "") -> AnswerHead:
    """Return the headers and trailers of a successful call whose message is compressed by ``coding``."""
    encoding = [(b"grpc-encoding", coding.encode())] if coding else []
    return AnswerHead(200, (*OK_HEADERS, *encoding), OK_TRAILERS)


OK: Final = ok_head()


def refuse_call(exchange: Exchange, error: RequestError) -> None:
    """End a call with an error status: in trailers if messages were sent, else in the headers alone."""
    if exchange.started:
        exchange.finish(status_trailers(error))
    else:
        accepted = [ACCEPT_ENCODING] if error.code is errors.Code.UNIMPLEMENTED else []
        exchange.start(200, [CONTENT_TYPE, *status_trailers(error), *accepted], end=True)


def status_trailers(error: RequestError) -> list[tuple[bytes, bytes]]:
    trailers = [
        (b"grpc-status", str(STATUS[error.code][1]).encode()),
        (b"grpc-message", grpc_message(str(error))),
    ]
    if isinstance(error, errors.Stopping):
        trailers.append(RETRY_PUSHBACK)
    elif isinstance(error, errors.RateLimited):
        trailers.append((RETRY_PUSHBACK[0], b"%d" % math.ceil(error.retry_after_s * 1000)))
        trailers.append((RETRY_AFTER, b"%d" % retry_after_s(error)))
    return trailers


def grpc_message(text: str) -> bytes:
    """Return a ``grpc-message``: percent-encoded UTF-8, cut to what every client accepts."""
    text = text[:MAX_MESSAGE_NBYTES]
    while len(encoded := urllib.parse.quote(text, safe=_UNQUOTED)) > MAX_MESSAGE_NBYTES:
        text = text[: len(text) * MAX_MESSAGE_NBYTES // len(encoded)]
    return encoded.encode()


# ---- calls that await or are refused -------------------------------------------------------------

#: Messages of small calls hold a few names at most.
MAX_SMALL_NBYTES: Final = 1 << 20
NO_TRAILERS: Final = (
    "a gRPC call needs the header 'te: trailers', which is missing: "
    "the client or a proxy does not speak gRPC over HTTP/2"
)

#: An awaiting method. It raises the ``RequestError`` that becomes the status of the call.
Method: TypeAlias = Callable[[CallHead, AsyncRequest], Awaitable[None]]


async def serve(method: Method, call: CallHead, request: AsyncRequest) -> None:
    """Run a method, and send the status of any error that it raises."""
    try:
        await method(call, request)
    except Exception as error:
        if not (request.gone and isinstance(error, OSError)):
            refuse_call(request.exchange, client_error(error, f"serving {request.head.path}"))


async def small_message(call: CallHead, request: AsyncRequest) -> bytes:
    """Return the single message of a small call. Raises RequestError, or ClientGone if the client left."""
    body = await request.body(MAX_SMALL_NBYTES)
    return bytes(unary_message(body, MAX_SMALL_NBYTES, call.encoding))


async def small_messages(call: CallHead, request: AsyncRequest, max_nbytes: int) -> AsyncIterator[bytes]:
    """Yield the small messages of a stream. Raises RequestError, or ClientGone if the client left."""
    unframer = Unframer(max_nbytes, call.encoding)
    while (part := await request.part()) is not None:
        for body in unframer.feed(part):
            yield body
    unframer.finish()


def send_message(exchange: Exchange, message: bytes) -> None:
    """End a successful call with one message."""
    exchange.answer(OK, (frame(len(message)), message), PREFIX_NBYTES + len(message))


class Refused:
    """A receiver that answers a call with an error once its request has ended: an earlier one may be lost."""

    __slots__ = ("_error", "_exchange")

    def __init__(self, error: RequestError, exchange: Exchange) -> None:
        self._error = error
        self._exchange = exchange

    def receive_body(self, data: Piece, end: bool) -> None:
        self._exchange.consumed(len(data))
        if end:
            refuse_call(self._exchange, self._error)

    def abandon(self) -> None:
        pass


class RefusedStream(Refused):
    """A receiver that answers a stream with an error in the next turn of the event loop, before its end."""

    __slots__ = ()

    def __init__(self, error: RequestError, exchange: Exchange) -> None:
        super().__init__(error, exchange)
        asyncio.get_running_loop().call_soon(refuse_call, exchange, error)

    def receive_body(self, data: Piece, end: bool) -> None:
        self._exchange.consumed(len(data))
