"""gRPC calls over one HTTP/2 connection, many at once. Bytes and times in, bytes out; no socket, no clock.

Requests are serialised before; what comes back is counted and not parsed, but for the status of a call and,
in streams, a message that holds an error in the place of a response.
"""

from __future__ import annotations

import urllib.parse
from collections import deque
from collections.abc import Sequence
from typing import Final

from gpuserve.bench import http2
from gpuserve.bench.calls import LOST, Call, Failure, ProtocolBroken, Sink
from gpuserve.bench.grpc_status import STATUS_NAMES

_PREFIX_NBYTES: Final = 5
_MAX_TEXT_NBYTES: Final = 512
#: How a ModelStreamInferResponse begins whose ``error_message`` is set: field 1, length-delimited.
_ERROR_TAG: Final = 0x0A
_MAX_STREAM_ID: Final = (1 << 31) - 1
_GIVE_BACK_NBYTES: Final = 1 << 30


class _Stream:
    """What is known of one call while it is under way."""

    __slots__ = ("call", "failure", "headers", "message_left", "prefix", "said", "unsent", "window")

    def __init__(self, call: Call, window: int) -> None:
        self.call = call
        self.window = window
        self.unsent: memoryview | None = None
        self.message_left = 0
        self.prefix = b""
        self.headers = False
        self.failure: Failure | None = None
        self.said: bytearray | None = None


class GrpcCalls:
    """The calls of one connection; ``requests`` are framed messages, ``headers`` the block of every call.

    ``in_streams``: the method is ModelStreamInfer, whose responses may be errors.
    """

    def __init__(
        self,
        sink: Sink,
        headers: bytes,
        requests: Sequence[bytes],
        blocks: http2.HeaderBlocks,
        *,
        in_streams: bool,
    ) -> None:
        self.out = bytearray()
        self._sink = sink
        self._headers = headers
        self._requests = requests
        self._blocks = blocks
        self._in_streams = in_streams
        self._streams: dict[int, _Stream] = {}
        self._ids: dict[Call, int] = {}
        self._stalled: deque[int] = deque()
        self._next_id = 1
        self._window = self._first_window = http2.FIRST_WINDOW_NBYTES
        self._max_frame = http2.FIRST_FRAME_NBYTES
        self._max_streams = 100  # until the server says more, what the standard calls the least
        self._rest = b""
        self._block: tuple[int, int, bytearray] | None = None
        self._received_nbytes = 0
        self._closing = False
        self._is_open = False

    @property
    def room(self) -> bool:
        """See ``Calls``."""
        return self._is_open and not self._closing and len(self._streams) < self._max_streams

    @property
    def usable(self) -> bool:
        """See ``Calls``."""
        return not self._closing

    @property
    def in_flight(self) -> int:
        """See ``Calls``."""
        return len(self._streams)

    def opened(self) -> None:
        """Greet; calls begin when the server's settings are there."""
        self.out += http2.opening()

    def begin(self, call: Call) -> None:
        """See ``Calls``."""
        number = self._next_id
        self._next_id += 2
        self._closing = self._next_id > _MAX_STREAM_ID
        stream = self._streams[number] = _Stream(call, self._first_window)
        self._ids[call] = number
        body = self._requests[call.request]
        nbytes = len(body)
        headers = self._headers
        self.out += http2.head(len(headers), http2.HEADERS, http2.END_HEADERS, number)
        self.out += headers
        if nbytes <= self._max_frame and nbytes <= self._window and nbytes <= stream.window:
            self._window -= nbytes
            self.out += http2.head(nbytes, http2.DATA, http2.END_STREAM, number)
            self.out += body
            return
        stream.unsent = memoryview(body)
        self._stalled.append(number)
        self._send_stalled()

    def cancel(self, call: Call) -> bool:
        """See ``Calls``."""
        number = self._ids.get(call)
        if number is not None:
            self._forget(number, call)
            self.out += http2.frame(http2.RESET, 0, number, http2.CANCELLED)
        return True

    def lost(self, failure: Failure, now: float) -> None:
        """See ``Calls``."""
        self._closing = True
        for number, stream in list(self._streams.items()):
            self._end(number, stream, failure, now)

    def take(self, data: bytes, now: float) -> None:
        """See ``Calls``."""
        received = self._rest + data if self._rest else data
        position, end_of_all = 0, len(received)
        while end_of_all - position >= http2.HEAD_NBYTES:
            start = position + http2.HEAD_NBYTES
            end = start + int.from_bytes(received[position : position + 3])
            if end > end_of_all:
                break
            kind, flags = received[position + 3], received[position + 4]
            number = int.from_bytes(received[position + 5 : start]) & _MAX_STREAM_ID
            if kind == http2.DATA:
                self._take_data(number, flags, received, start, end, now)
            elif kind == http2.HEADERS and flags & http2.END_HEADERS and not flags & ~5:
                self._take_headers(number, flags, received[start:end], now)
            else:
                self._take_other(kind, flags, number, received[start:end], now)
            position = end
        self._rest = received[position:]

    def _take_data(self, number: int, flags: int, received: bytes, start: int, end: int, now: float) -> None:
        self._received_nbytes += end - start
        if self._received_nbytes >= _GIVE_BACK_NBYTES:
            self.out += http2.window_update(0, self._received_nbytes)
            self._received_nbytes = 0
        stream = self._streams.get(number)
        if stream is None:  # it was cancelled
            return
        if flags & http2.PADDED:
            start, end = start + 1, end - received[start]
        position = start
        while position < end:
            if stream.message_left:
                position = self._take_message(stream, received, position, end, now)
                continue
            missing = _PREFIX_NBYTES - len(stream.prefix)
            stream.prefix += received[position : min(position + missing, end)]
            position += missing
            if len(stream.prefix) == _PREFIX_NBYTES:
                stream.message_left = int.from_bytes(stream.prefix[1:])
                stream.prefix = b""
                if not stream.message_left:
                    self._sink.responded(stream.call, now)
        if flags & http2.END_STREAM:
            self._end(number, stream, Failure("no status", "the answer ended without grpc-status"), now)

    def _take_message(self, stream: _Stream, received: bytes, position: int, end: int, now: float) -> int:
        """As much of a message as there is; returns where it ends."""
        upto = min(end, position + stream.message_left)
        if self._in_streams:
            if stream.said is None:
                stream.said = bytearray()
            if len(stream.said) < _MAX_TEXT_NBYTES:
                stream.said += received[position : min(upto, position + _MAX_TEXT_NBYTES)]
        stream.message_left -= upto - position
        if not stream.message_left:
            self._message_ended(stream, now)
        return upto

    def _message_ended(self, stream: _Stream, now: float) -> None:
        said, stream.said = stream.said, None
        if said and said[0] == _ERROR_TAG:
            stream.failure = Failure("stream error", _text_of(said))
        else:
            self._sink.responded(stream.call, now)

    def _take_headers(self, number: int, flags: int, block: bytes, now: float) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        try:
            headers = self._blocks.read(block)
        except ValueError as error:
            raise ProtocolBroken(str(error)) from None
        if not stream.headers and headers.get(":status") != "200":
            stream.failure = Failure(f"HTTP {headers.get(':status')}", headers.get("grpc-message", ""))
        stream.headers = True
        if flags & http2.END_STREAM:
            self._end(number, stream, stream.failure or self._failure_of(headers, stream.call), now)

    def _take_other(self, kind: int, flags: int, number: int, payload: bytes, now: float) -> None:
        match kind:
            case http2.HEADERS:
                self._begin_block(number, flags, payload, now)
            case http2.CONTINUATION:
                self._continue_block(flags, payload, now)
            case http2.WINDOW_UPDATE:
                self._widen(number, int.from_bytes(payload))
            case http2.SETTINGS if not flags & http2.ACK:
                self._take_settings(payload)
                self.out += http2.frame(http2.SETTINGS, http2.ACK, 0, b"")
            case http2.PING if not flags & http2.ACK:
                self.out += http2.frame(http2.PING, http2.ACK, 0, payload)
            case http2.RESET if (stream := self._streams.get(number)) is not None:
                code = int.from_bytes(payload)
                self._end(number, stream, Failure("stream reset", f"RST_STREAM with error code {code}"), now)
            case http2.GOAWAY:
                self._go_away(int.from_bytes(payload[:4]) & _MAX_STREAM_ID, now)

    def _begin_block(self, number: int, flags: int, payload: bytes, now: float) -> None:
        """Headers with padding, with a priority, or in several frames."""
        padding = payload[0] if flags & http2.PADDED else 0
        start = bool(flags & http2.PADDED) + (5 if flags & http2.PRIORITY else 0)
        self._block = (number, flags, bytearray(payload[start : len(payload) - padding]))
        if flags & http2.END_HEADERS:
            self._continue_block(flags, b"", now)

    def _continue_block(self, flags: int, payload: bytes, now: float) -> None:
        if self._block is None:
            raise ProtocolBroken("the server continued headers that it had not begun")
        number, first_flags, block = self._block
        block += payload
        if flags & http2.END_HEADERS:
            self._block = None
            self._take_headers(number, first_flags, bytes(block), now)

    def _go_away(self, last: int, now: float) -> None:
        """No new calls; those that the server has not seen fail at once."""
        self._closing = True
        for number, stream in list(self._streams.items()):
            if number > last:
                self._end(number, stream, LOST, now)

    def _take_settings(self, payload: bytes) -> None:
        self._max_streams = 1 << 31 if not self._is_open else self._max_streams
        self._is_open = True
        for at in range(0, len(payload), 6):
            value = int.from_bytes(payload[at + 2 : at + 6])
            match int.from_bytes(payload[at : at + 2]):
                case http2.MAX_STREAMS:
                    self._max_streams = value
                case http2.MAX_FRAME:
                    self._max_frame = value
                case http2.INITIAL_WINDOW:
                    for stream in self._streams.values():
                        stream.window += value - self._first_window
                    self._first_window = value
        self._send_stalled()

    def _widen(self, number: int, nbytes: int) -> None:
        if number == 0:
            self._window += nbytes
        elif (stream := self._streams.get(number)) is not None:
            stream.window += nbytes
        if self._stalled:
            self._send_stalled()

    def _send_stalled(self) -> None:
        """What the flow control lets go of the requests that are not sent whole, in turn."""
        for _ in range(len(self._stalled)):
            number = self._stalled.popleft()
            stream = self._streams.get(number)
            if stream is not None and not self._send_part(number, stream):
                self._stalled.append(number)

    def _send_part(self, number: int, stream: _Stream) -> bool:
        """Returns whether the request is sent whole."""
        rest = stream.unsent
        while rest is not None:
            nbytes = min(len(rest), self._window, stream.window, self._max_frame)
            if nbytes <= 0:
                stream.unsent = rest
                return False
            is_last = nbytes == len(rest)
            self.out += http2.head(nbytes, http2.DATA, http2.END_STREAM if is_last else 0, number)
            self.out += rest[:nbytes]
            self._window -= nbytes
            stream.window -= nbytes
            rest = None if is_last else rest[nbytes:]
        stream.unsent = None
        return True

    def _end(self, number: int, stream: _Stream, failure: Failure | None, now: float) -> None:
        if stream.unsent is not None:  # answered before it was sent: an early refusal
            self.out += http2.frame(http2.RESET, 0, number, http2.CANCELLED)
        self._forget(number, stream.call)
        self._sink.ended(stream.call, failure, now)

    def _failure_of(self, trailers: dict[str, str], call: Call) -> Failure | None:
        status = trailers.get("grpc-status", "")
        if status != "0":
            text = urllib.parse.unquote(trailers.get("grpc-message", ""))
            return Failure(STATUS_NAMES.get(status, f"status {status or 'missing'}"), text[:_MAX_TEXT_NBYTES])
        if not call.responses and not self._in_streams:
            return Failure("no response", "the call ended well and without a response")
        return None

    def _forget(self, number: int, call: Call) -> None:
        del self._streams[number]
        del self._ids[call]


def _text_of(message: bytearray) -> str:
    """``error_message`` of a serialized ModelStreamInferResponse, as far as it was kept."""
    position = 1
    while position < len(message) and message[position] & 0x80:
        position += 1
    return bytes(message[position + 1 :]).decode(errors="replace")
