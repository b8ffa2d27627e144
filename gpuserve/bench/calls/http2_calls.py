"""gRPC calls over one HTTP/2 connection, many at once. Bytes and times in, bytes out; no socket, no clock.
What comes back is counted and not parsed, but for the status and error messages in streams.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Final, NamedTuple

from gpuserve.bench.calls import http2
from gpuserve.bench.calls.call import LOST, CallSink, Failure, ProtocolBroken, TimedCall

#: The statuses of gRPC by their numbers, as trailers have them.
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
#: How a ModelStreamInferResponse begins whose ``error_message`` is set: field 1, length-delimited.
_ERROR_TAG: Final = 0x0A
_GIVE_BACK_NBYTES: Final = 1 << 30
#: Largest frame that the server may send.
_FRAME_NBYTES: Final = 1 << 20
_UNLIMITED: Final = 1 << 31


class GrpcRequests(NamedTuple):
    """What every connection sends, a header block and bodies in turn; ``in_streams`` is ModelStreamInfer."""

    headers: bytes
    bodies: Sequence[bytes]
    in_streams: bool


class _GrpcAnswer:
    """The answer to one call, as far as it has come."""

    __slots__ = ("_message_left", "_prefix", "_start", "call", "failure", "has_headers")

    def __init__(self, call: TimedCall) -> None:
        self.call = call
        self.failure: Failure | None = None
        self.has_headers = False
        self._message_left = 0
        self._prefix = b""
        self._start = b""

    def take(self, payload: bytes, keep_nbytes: int) -> list[bytes]:
        """For each message that ends in this payload, at most ``keep_nbytes`` of its start."""
        messages = []
        position, end = 0, len(payload)
        while position < end:
            if self._message_left:
                upto = min(end, position + self._message_left)
                if len(self._start) < keep_nbytes:  # 0 where messages are only counted
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
    """The calls of one connection. ``blocks`` may be shared by connections to the same server."""

    def __init__(self, sink: CallSink, requests: GrpcRequests, blocks: http2.HeaderBlocks) -> None:
        self.out = bytearray()
        self._sink = sink
        self._requests = requests
        self._blocks = blocks
        self._reader = http2.FrameReader()
        self._windows = http2.SendWindows(self.out)
        self._answers: dict[int, _GrpcAnswer] = {}
        self._next_id = 1
        self._max_streams: int | None = None  # until the server's settings are there
        self._block: tuple[int, int, bytearray] | None = None
        self._received_nbytes = 0
        self._closing = False

    @property
    def room(self) -> bool:
        most = self._max_streams
        return most is not None and not self._closing and len(self._answers) < most

    @property
    def usable(self) -> bool:
        return not self._closing

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    def opened(self) -> None:
        """Send the opening; calls can begin when the server's settings are there."""
        self.out += http2.opening({http2.TABLE_SIZE: 0, http2.MAX_FRAME: _FRAME_NBYTES})

    def begin(self, call: TimedCall) -> None:
        stream = call.stream = self._next_id
        self._next_id += 2
        self._closing = self._next_id > http2.MAX_STREAM_ID
        self._answers[stream] = _GrpcAnswer(call)
        headers = self._requests.headers
        self.out += http2.head(len(headers), http2.HEADERS, http2.END_HEADERS, stream)
        self.out += headers
        self._windows.send(stream, self._requests.bodies[call.request])

    def cancel(self, call: TimedCall) -> bool:
        answer = self._answers.get(call.stream)
        if answer is not None and answer.call is call:
            self._forget(call.stream)
            self.out += http2.frame(http2.RESET, 0, call.stream, http2.CANCELLED)
        return True

    def lost(self, failure: Failure, now: float) -> None:
        self._closing = True
        for answer in list(self._answers.values()):
            self._end(answer, failure, now)

    def take(self, data: bytes, now: float) -> None:
        for kind, flags, stream, payload in self._reader.read(data):
            if kind == http2.DATA:
                self._take_data(stream, flags, payload, now)
            elif kind == http2.HEADERS and flags & http2.END_HEADERS and not flags & ~5:
                self._take_headers(stream, flags, payload, now)
            else:
                self._take_other(kind, flags, stream, payload, now)

    def _take_data(self, stream: int, flags: int, payload: bytes, now: float) -> None:
        self._received_nbytes += len(payload)
        if self._received_nbytes >= _GIVE_BACK_NBYTES:
            self.out += http2.window_update(0, self._received_nbytes)
            self._received_nbytes = 0
        answer = self._answers.get(stream)
        if answer is None:  # it was cancelled
            return
        if flags & http2.PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        in_streams = self._requests.in_streams
        for message in answer.take(payload, _MAX_TEXT_NBYTES if in_streams else 0):
            if message and message[0] == _ERROR_TAG:
                answer.failure = Failure("stream error", _text_of(message))
            else:
                self._sink.responded(answer.call, now)
        if flags & http2.END_STREAM:
            self._end(answer, Failure("no status", "the answer ended without grpc-status"), now)

    def _take_headers(self, stream: int, flags: int, block: bytes, now: float) -> None:
        answer = self._answers.get(stream)
        if answer is None:
            return
        try:
            headers = self._blocks.read(block)
        except ValueError as error:
            raise ProtocolBroken(str(error)) from None
        if not answer.has_headers and headers.get(":status") != "200":
            answer.failure = Failure(f"HTTP {headers.get(':status')}", headers.get("grpc-message", ""))
        answer.has_headers = True
        if flags & http2.END_STREAM:
            self._end(answer, answer.failure or self._failure_of(headers, answer.call), now)

    def _take_other(self, kind: int, flags: int, stream: int, payload: bytes, now: float) -> None:
        match kind:
            case http2.HEADERS:
                self._begin_block(stream, flags, payload, now)
            case http2.CONTINUATION:
                self._continue_block(flags, payload, now)
            case http2.WINDOW_UPDATE:
                self._windows.widen(stream, int.from_bytes(payload))
            case http2.SETTINGS | http2.PING:
                if kind == http2.SETTINGS and not flags & http2.ACK:
                    self._take_settings(payload)
                self.out += http2.acknowledgement(kind, flags, payload)
            case http2.RESET if (answer := self._answers.get(stream)) is not None:
                code = int.from_bytes(payload)
                self._end(answer, Failure("stream reset", f"RST_STREAM with error code {code}"), now)
            case http2.GOAWAY:
                self._go_away(int.from_bytes(payload[:4]) & http2.MAX_STREAM_ID, now)

    def _begin_block(self, stream: int, flags: int, payload: bytes, now: float) -> None:
        """Headers with padding, with a priority, or in several frames."""
        padding = payload[0] if flags & http2.PADDED else 0
        start = bool(flags & http2.PADDED) + (5 if flags & http2.PRIORITIZED else 0)
        self._block = (stream, flags, bytearray(payload[start : len(payload) - padding]))
        if flags & http2.END_HEADERS:
            self._continue_block(flags, b"", now)

    def _continue_block(self, flags: int, payload: bytes, now: float) -> None:
        if self._block is None:
            raise ProtocolBroken("the server continued headers that it had not begun")
        stream, first_flags, block = self._block
        block += payload
        if flags & http2.END_HEADERS:
            self._block = None
            self._take_headers(stream, first_flags, bytes(block), now)

    def _go_away(self, last: int, now: float) -> None:
        """No new calls; those that the server has not seen fail at once."""
        self._closing = True
        for stream, answer in list(self._answers.items()):
            if stream > last:
                self._end(answer, LOST, now)

    def _take_settings(self, payload: bytes) -> None:
        if self._max_streams is None:
            self._max_streams = _UNLIMITED
        for number, value in http2.settings_of(payload):
            if number == http2.MAX_STREAMS:
                self._max_streams = value
            self._windows.take_setting(number, value)

    def _end(self, answer: _GrpcAnswer, failure: Failure | None, now: float) -> None:
        if self._forget(answer.call.stream):  # answered before it was sent whole: an early refusal
            self.out += http2.frame(http2.RESET, 0, answer.call.stream, http2.CANCELLED)
        self._sink.ended(answer.call, failure, now)

    def _failure_of(self, trailers: dict[str, str], call: TimedCall) -> Failure | None:
        status = trailers.get("grpc-status", "")
        if status != "0":
            text = urllib.parse.unquote(trailers.get("grpc-message", ""))
            return Failure(STATUS_NAMES.get(status, f"status {status or 'missing'}"), text[:_MAX_TEXT_NBYTES])
        if not call.responses and not self._requests.in_streams:
            return Failure("no response", "the call ended well and without a response")
        return None

    def _forget(self, stream: int) -> bool:
        """Returns whether the request was not sent whole."""
        del self._answers[stream]
        return self._windows.forget(stream)


def _text_of(message: bytes) -> str:
    """``error_message`` of a serialized ModelStreamInferResponse, as far as it was kept."""
    position = 1
    while position < len(message) and message[position] & 0x80:
        position += 1
    return message[position + 1 :].decode(errors="replace")
