"""The calls of one connection, over gRPC (HTTP/2, many at once) or HTTP/1.1 (one at a time). Received bytes
and times go in, bytes to send come out: no socket, no clock. Answers are counted and mostly not parsed.
"""

from __future__ import annotations

import enum
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpuserve.cli.bench import http2_client as h2
from gpuserve.cli.bench.load_generator import CONNECTION_LOST, CallSink, Failure, ProtocolError, TimedCall

#: Names of gRPC statuses by their number in trailers.
STATUS_NAMES: Final = {
    str(number): name
    for number, name in enumerate(
        (
            "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
            "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
            "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
        )
    )
}  # fmt: skip
_PREFIX_NBYTES: Final = 5
_MAX_TEXT_NBYTES: Final = 512
#: The first byte of a ModelStreamInferResponse with ``error_message``: field 1, length-delimited.
_ERROR_TAG: Final = 0x0A
_WINDOW_UPDATE_NBYTES: Final = 1 << 30
#: Largest frame that the server may send.
_FRAME_NBYTES: Final = 1 << 20
_UNLIMITED: Final = 1 << 31


class GrpcRequests(NamedTuple):
    """The header block and the bodies that every connection sends in turn, perhaps by ModelStreamInfer."""

    headers: bytes
    bodies: Sequence[bytes]
    in_streams: bool


def _error_text(message: bytes) -> str:
    """Return ``error_message`` of a ModelStreamInferResponse whose start is given. Fields may follow it."""
    nbytes, position = 0, 1  # after the tag, the length as a varint
    while position < len(message):
        byte = message[position]
        nbytes |= (byte & 0x7F) << 7 * (position - 1)
        position += 1
        if byte < 0x80:
            break
    return message[position : position + nbytes].decode(errors="replace")


class _GrpcAnswer:
    """The received part of the answer to one call."""

    __slots__ = ("_message_left", "_prefix", "_start", "call", "failure", "has_headers")

    def __init__(self, call: TimedCall) -> None:
        self.call = call
        self.failure: Failure | None = None
        self.has_headers = False
        self._message_left = 0
        self._prefix = b""
        self._start = b""

    def receive(self, payload: bytes, keep_nbytes: int) -> list[bytes]:
        """Return for each message that ends in this payload at most ``keep_nbytes`` of its start."""
        messages = []
        position, end = 0, len(payload)
        while position < end:
            if self._message_left:
                upto = min(end, position + self._message_left)
                if len(self._start) < keep_nbytes:  # 0 if messages are only counted
                    self._start += payload[position : min(upto, position + keep_nbytes)]
                self._message_left -= upto - position
                position = upto
            else:
                missing = _PREFIX_NBYTES - len(self._prefix)
                self._prefix += payload[position : position + missing]
                position += missing
                if len(self._prefix) < _PREFIX_NBYTES:
                    break
                self._message_left = int.from_bytes(self._prefix[1:])
                self._prefix = b""
            if not self._message_left:
                messages.append(self._start)
                self._start = b""
        return messages


class GrpcCalls:
    """The calls of one HTTP/2 connection. Connections to the same server may share ``blocks``."""

    def __init__(self, sink: CallSink, requests: GrpcRequests, blocks: h2.HeaderBlocks) -> None:
        self.out = bytearray()
        self._sink = sink
        self._requests = requests
        self._blocks = blocks
        self._reader = h2.FrameReader()
        self._windows = h2.SendWindows(self.out)
        self._answers: dict[int, _GrpcAnswer] = {}
        self._next_id = 1
        self._max_streams: int | None = None  # None until the server's settings arrive
        self._block: tuple[int, int, bytearray] | None = None
        self._received_nbytes = 0
        self._closing = False

    @property
    def has_room(self) -> bool:
        most = self._max_streams
        return most is not None and not self._closing and len(self._answers) < most

    @property
    def is_usable(self) -> bool:
        return not self._closing

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    def on_connected(self) -> None:
        """Send the preface; calls can start when the server's settings arrive."""
        self.out += h2.connection_preface({h2.TABLE_SIZE: 0, h2.MAX_FRAME: _FRAME_NBYTES})

    def start_call(self, call: TimedCall) -> None:
        stream = call.stream = self._next_id
        self._next_id += 2
        self._closing = self._next_id > h2.MAX_STREAM_ID
        self._answers[stream] = _GrpcAnswer(call)
        headers = self._requests.headers
        self.out += h2.frame_head(len(headers), h2.HEADERS, h2.END_HEADERS, stream)
        self.out += headers
        self._windows.send(stream, self._requests.bodies[call.request])

    def cancel(self, call: TimedCall) -> bool:
        answer = self._answers.get(call.stream)
        if answer is not None and answer.call is call:
            self._forget(call.stream)
            self.out += h2.frame(h2.RESET, 0, call.stream, h2.CANCELLED)
        return True

    def fail_all(self, failure: Failure, now: float) -> None:
        self._closing = True
        for answer in list(self._answers.values()):
            self._end(answer, failure, now)

    def receive(self, data: bytes, now: float) -> None:
        for kind, flags, stream, payload in self._reader.read(data):
            if kind == h2.DATA:
                self._receive_data(stream, flags, payload, now)
            elif kind == h2.HEADERS and flags & h2.END_HEADERS and not flags & ~5:
                self._receive_headers(stream, flags, payload, now)
            else:
                self._receive_other(kind, flags, stream, payload, now)

    def _receive_data(self, stream: int, flags: int, payload: bytes, now: float) -> None:
        self._received_nbytes += len(payload)
        if self._received_nbytes >= _WINDOW_UPDATE_NBYTES:
            self.out += h2.window_update(0, self._received_nbytes)
            self._received_nbytes = 0
        answer = self._answers.get(stream)
        if answer is None:  # the call was cancelled
            return
        if flags & h2.PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        in_streams = self._requests.in_streams
        for message in answer.receive(payload, _MAX_TEXT_NBYTES if in_streams else 0):
            if message and message[0] == _ERROR_TAG:
                answer.failure = Failure("stream error", _error_text(message))
            else:
                self._sink.on_response(answer.call, now)
        if flags & h2.END_STREAM:
            self._end(answer, Failure("no status", "the answer ended without grpc-status"), now)

    def _receive_headers(self, stream: int, flags: int, block: bytes, now: float) -> None:
        answer = self._answers.get(stream)
        if answer is None:
            return
        try:
            headers = self._blocks.read(block)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if not answer.has_headers and headers.get(":status") != "200":
            answer.failure = Failure(f"HTTP {headers.get(':status')}", headers.get("grpc-message", ""))
        answer.has_headers = True
        if flags & h2.END_STREAM:
            self._end(answer, answer.failure or self._failure_of(headers, answer.call), now)

    def _receive_other(self, kind: int, flags: int, stream: int, payload: bytes, now: float) -> None:
        match kind:
            case h2.HEADERS:
                self._start_block(stream, flags, payload, now)
            case h2.CONTINUATION:
                self._continue_block(flags, payload, now)
            case h2.WINDOW_UPDATE:
                self._windows.add_window(stream, int.from_bytes(payload))
            case h2.SETTINGS | h2.PING:
                if kind == h2.SETTINGS and not flags & h2.ACK:
                    self._apply_settings(payload)
                self.out += h2.acknowledge(kind, flags, payload)
            case h2.RESET if (answer := self._answers.get(stream)) is not None:
                code = int.from_bytes(payload)
                self._end(answer, Failure("stream reset", f"RST_STREAM with error code {code}"), now)
            case h2.GOAWAY:
                self._closing = True
                last = int.from_bytes(payload[:4]) & h2.MAX_STREAM_ID
                for unseen in [one for number, one in self._answers.items() if number > last]:
                    self._end(unseen, CONNECTION_LOST, now)

    def _start_block(self, stream: int, flags: int, payload: bytes, now: float) -> None:
        """Process HEADERS with padding, with a priority, or without END_HEADERS."""
        padding = payload[0] if flags & h2.PADDED else 0
        start = bool(flags & h2.PADDED) + (5 if flags & h2.PRIORITIZED else 0)
        self._block = (stream, flags, bytearray(payload[start : len(payload) - padding]))
        if flags & h2.END_HEADERS:
            self._continue_block(flags, b"", now)

    def _continue_block(self, flags: int, payload: bytes, now: float) -> None:
        if self._block is None:
            raise ProtocolError("the server sent CONTINUATION without HEADERS")
        stream, first_flags, block = self._block
        block += payload
        if flags & h2.END_HEADERS:
            self._block = None
            self._receive_headers(stream, first_flags, bytes(block), now)

    def _apply_settings(self, payload: bytes) -> None:
        if self._max_streams is None:
            self._max_streams = _UNLIMITED
        for number, value in h2.parse_settings(payload):
            if number == h2.MAX_STREAMS:
                self._max_streams = value
            self._windows.apply_setting(number, value)

    def _end(self, answer: _GrpcAnswer, failure: Failure | None, now: float) -> None:
        if self._forget(answer.call.stream):  # the server rejected the call before its body was sent
            self.out += h2.frame(h2.RESET, 0, answer.call.stream, h2.CANCELLED)
        self._sink.on_end(answer.call, failure, now)

    def _failure_of(self, trailers: dict[str, str], call: TimedCall) -> Failure | None:
        status = trailers.get("grpc-status", "")
        if status != "0":
            text = urllib.parse.unquote(trailers.get("grpc-message", ""))
            return Failure(STATUS_NAMES.get(status, f"status {status or 'missing'}"), text[:_MAX_TEXT_NBYTES])
        if not call.responses and not self._requests.in_streams:
            return Failure("no response", "the call ended well and without a response")
        return None

    def _forget(self, stream: int) -> bool:
        """Drop a call; return whether a part of its request is unsent."""
        del self._answers[stream]
        return self._windows.forget(stream)


_MAX_HEAD_NBYTES: Final = 1 << 16
_HEAD_END: Final = b"\r\n\r\n"
_EVENT: Final = b"data:"
#: The start of an event that reports the failure of a started stream.
_ERROR_EVENT: Final = b'data: {"error"'


class _AnswerPart(enum.Enum):
    """The part of an HTTP/1.1 answer that is expected next."""

    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNK_HEAD = enum.auto()
    CHUNK = enum.auto()
    TRAILERS = enum.auto()


@dataclass(slots=True)
class _HttpAnswer:
    """The answer being received: the start of an error's body, and of the next line of events."""

    status: int = 0
    text: bytes = b""
    line: bytes = b""
    failure: Failure | None = None


class HttpCalls:
    """The calls of one HTTP/1.1 connection. With ``in_streams`` a response is an event, else the answer."""

    def __init__(self, sink: CallSink, requests: Sequence[bytes], *, in_streams: bool) -> None:
        self.out = bytearray()
        self._sink = sink
        self._requests = requests
        self._in_streams = in_streams
        self._call: TimedCall | None = None
        self._answer = _HttpAnswer()
        self._part = _AnswerPart.HEAD
        self._rest = b""
        self._left_nbytes = 0
        self._is_open = False
        self._closing = False
        self._steps: dict[_AnswerPart, Callable[[bytes, int, float], int]] = {
            _AnswerPart.HEAD: self._receive_head,
            _AnswerPart.BODY: self._receive_body,
            _AnswerPart.CHUNK_HEAD: self._receive_chunk_head,
            _AnswerPart.CHUNK: self._receive_chunk,
            _AnswerPart.TRAILERS: self._receive_trailers,
        }

    @property
    def has_room(self) -> bool:
        return self._is_open and self._call is None and not self._closing

    @property
    def is_usable(self) -> bool:
        return not self._closing

    @property
    def in_flight(self) -> int:
        return self._call is not None

    def on_connected(self) -> None:
        self._is_open = True

    def start_call(self, call: TimedCall) -> None:
        self._call = call
        self.out += self._requests[call.request]

    def cancel(self, call: TimedCall) -> bool:
        """Drop the call and require a new connection, because HTTP/1.1 has no cancellation."""
        if self._call is not call:
            return True
        self._call = None
        self._closing = True
        return False

    def fail_all(self, failure: Failure, now: float) -> None:
        self._closing = True
        call, self._call = self._call, None
        if call is not None:
            self._sink.on_end(call, failure, now)

    def receive(self, data: bytes, now: float) -> None:
        received = self._rest + data if self._rest else data
        position = 0
        while position < len(received):
            if self._call is None:
                if self._closing:  # the rest of a cancelled answer
                    return
                raise ProtocolError("the server sent bytes after the end of its answer")
            reached = self._steps[self._part](received, position, now)
            if reached == position:
                break
            position = reached
        self._rest = received[position:]

    def _receive_head(self, received: bytes, position: int, now: float) -> int:
        end = received.find(_HEAD_END, position)
        if end < 0:
            if len(received) - position > _MAX_HEAD_NBYTES:
                raise ProtocolError(f"the head of an answer exceeds {_MAX_HEAD_NBYTES} bytes")
            return position
        lines = received[position:end].split(b"\r\n")
        try:
            status = int(lines[0].split(b" ", 2)[1])
            pairs = (line.partition(b":")[::2] for line in lines[1:])
            headers = {name.strip().lower(): value.strip() for name, value in pairs}
            self._left_nbytes = int(headers.get(b"content-length", b"0"))
        except (IndexError, ValueError):
            raise ProtocolError("the server does not speak HTTP/1.1") from None
        if 100 <= status < 200:
            return end + len(_HEAD_END)
        self._closing |= headers.get(b"connection", b"").lower() == b"close"
        self._answer = _HttpAnswer(status)
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._part = _AnswerPart.CHUNK_HEAD
        elif self._left_nbytes:
            self._part = _AnswerPart.BODY
        else:
            self._end(now)
        return end + len(_HEAD_END)

    def _receive_body(self, received: bytes, position: int, now: float) -> int:
        end = self._receive_content(received, position, now)
        if not self._left_nbytes:
            self._end(now)
        return end

    def _receive_content(self, received: bytes, position: int, now: float) -> int:
        """Process up to ``_left_nbytes`` bytes; return the position after them."""
        end = min(len(received), position + self._left_nbytes)
        self._left_nbytes -= end - position
        if self._answer.status != 200:
            text = self._answer.text + received[position : min(end, position + _MAX_TEXT_NBYTES)]
            self._answer.text = text[:_MAX_TEXT_NBYTES]
        elif self._in_streams:
            self._receive_events(received[position:end], now)
        return end

    def _receive_events(self, content: bytes, now: float) -> None:
        """Process complete lines of the event stream, and keep the start of the next one."""
        *lines, self._answer.line = (self._answer.line + content).split(b"\n")
        for line in lines:
            if line.startswith(_ERROR_EVENT):
                text = line.removeprefix(b"data: ")[:_MAX_TEXT_NBYTES].decode(errors="replace")
                self._answer.failure = Failure("stream error", text)
            elif line.startswith(_EVENT) and self._call is not None:
                self._sink.on_response(self._call, now)

    def _receive_chunk_head(self, received: bytes, position: int, now: float) -> int:
        end = received.find(b"\r\n", position)
        if end < 0:
            return position
        try:
            self._left_nbytes = int(received[position:end].partition(b";")[0], 16)
        except ValueError:
            raise ProtocolError("a chunk of an answer has no length") from None
        self._part = _AnswerPart.CHUNK if self._left_nbytes else _AnswerPart.TRAILERS
        self._left_nbytes += 2 if self._left_nbytes else 0  # the line break after the chunk
        return end + 2

    def _receive_chunk(self, received: bytes, position: int, now: float) -> int:
        if self._left_nbytes > 2:
            self._left_nbytes -= 2
            end = self._receive_content(received, position, now)
            self._left_nbytes += 2
            return end
        end = min(len(received), position + self._left_nbytes)
        self._left_nbytes -= end - position
        if not self._left_nbytes:
            self._part = _AnswerPart.CHUNK_HEAD
        return end

    def _receive_trailers(self, received: bytes, position: int, now: float) -> int:
        end = received.find(b"\r\n", position)
        if end < 0:
            return position
        if end == position:
            self._end(now)
        return end + 2

    def _end(self, now: float) -> None:
        call, self._call = self._call, None
        self._part = _AnswerPart.HEAD
        if call is None:
            return
        failure = self._answer.failure
        if self._answer.status != 200:
            failure = Failure(f"HTTP {self._answer.status}", self._answer.text.decode(errors="replace"))
        elif not self._in_streams:
            self._sink.on_response(call, now)
        self._sink.on_end(call, failure, now)
