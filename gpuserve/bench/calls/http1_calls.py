"""HTTP/1.1 calls over one connection, one at a time. Bytes and times in, bytes out; no socket, no clock. What
comes back is counted and not parsed, but for the status and server-sent events.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gpuserve.bench.calls.call import CallSink, Failure, ProtocolBroken, TimedCall

_MAX_HEAD_NBYTES: Final = 1 << 16
_MAX_TEXT_NBYTES: Final = 512
_HEAD_END: Final = b"\r\n\r\n"
_EVENT: Final = b"data:"
#: A stream that fails after it began says so in an event of this form.
_ERROR_EVENT: Final = b'data: {"error"'


class _Part(enum.Enum):
    """The part of an answer that is expected next."""

    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNK_HEAD = enum.auto()
    CHUNK = enum.auto()
    TRAILERS = enum.auto()


@dataclass(slots=True)
class _HttpAnswer:
    """The answer under way. ``text`` is the start of an error's body, ``line`` of the next line of events."""

    status: int = 0
    text: bytes = b""
    line: bytes = b""
    failure: Failure | None = None


class HttpCalls:
    """The calls of one connection. With ``in_streams`` a response is an event, not the whole answer."""

    def __init__(self, sink: CallSink, requests: Sequence[bytes], *, in_streams: bool) -> None:
        self.out = bytearray()
        self._sink = sink
        self._requests = requests
        self._in_streams = in_streams
        self._call: TimedCall | None = None
        self._answer = _HttpAnswer()
        self._part = _Part.HEAD
        self._rest = b""
        self._left = 0
        self._is_open = False
        self._closing = False
        self._steps: dict[_Part, Callable[[bytes, int, float], int]] = {
            _Part.HEAD: self._take_head,
            _Part.BODY: self._take_body,
            _Part.CHUNK_HEAD: self._take_chunk_head,
            _Part.CHUNK: self._take_chunk,
            _Part.TRAILERS: self._take_trailers,
        }

    @property
    def room(self) -> bool:
        return self._is_open and self._call is None and not self._closing

    @property
    def usable(self) -> bool:
        return not self._closing

    @property
    def in_flight(self) -> int:
        return self._call is not None

    def opened(self) -> None:
        self._is_open = True

    def begin(self, call: TimedCall) -> None:
        self._call = call
        self.out += self._requests[call.request]

    def cancel(self, call: TimedCall) -> bool:
        """Give up the connection with the call: HTTP/1.1 cannot take a request back."""
        if self._call is not call:
            return True
        self._call = None
        self._closing = True
        return False

    def lost(self, failure: Failure, now: float) -> None:
        self._closing = True
        call, self._call = self._call, None
        if call is not None:
            self._sink.ended(call, failure, now)

    def take(self, data: bytes, now: float) -> None:
        received = self._rest + data if self._rest else data
        position = 0
        while position < len(received):
            if self._call is None:
                if self._closing:  # of a request that was given up
                    return
                raise ProtocolBroken("the server sent more than the answer")
            reached = self._steps[self._part](received, position, now)
            if reached == position:
                break
            position = reached
        self._rest = received[position:]

    def _take_head(self, received: bytes, position: int, now: float) -> int:
        end = received.find(_HEAD_END, position)
        if end < 0:
            if len(received) - position > _MAX_HEAD_NBYTES:
                raise ProtocolBroken("the head of an answer does not end")
            return position
        lines = received[position:end].split(b"\r\n")
        try:
            status = int(lines[0].split(b" ", 2)[1])
            headers = dict(map(_header, lines[1:]))
            self._left = int(headers.get(b"content-length", b"0"))
        except (IndexError, ValueError):
            raise ProtocolBroken("the server does not speak HTTP/1.1") from None
        if 100 <= status < 200:
            return end + len(_HEAD_END)
        self._closing |= headers.get(b"connection", b"").lower() == b"close"
        self._answer = _HttpAnswer(status)
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._part = _Part.CHUNK_HEAD
        elif self._left:
            self._part = _Part.BODY
        else:
            self._end(now)
        return end + len(_HEAD_END)

    def _take_body(self, received: bytes, position: int, now: float) -> int:
        end = self._take_content(received, position, now)
        if not self._left:
            self._end(now)
        return end

    def _take_content(self, received: bytes, position: int, now: float) -> int:
        """As much of ``_left`` bytes as there is; returns where they end."""
        end = min(len(received), position + self._left)
        self._left -= end - position
        if self._answer.status != 200:
            text = self._answer.text + received[position : min(end, position + _MAX_TEXT_NBYTES)]
            self._answer.text = text[:_MAX_TEXT_NBYTES]
        elif self._in_streams:
            self._take_events(received[position:end], now)
        return end

    def _take_events(self, content: bytes, now: float) -> None:
        """Whole lines of the event stream; what is left is the start of the next one."""
        *lines, self._answer.line = (self._answer.line + content).split(b"\n")
        for line in lines:
            if line.startswith(_ERROR_EVENT):
                text = line.removeprefix(b"data: ")[:_MAX_TEXT_NBYTES].decode(errors="replace")
                self._answer.failure = Failure("stream error", text)
            elif line.startswith(_EVENT) and self._call is not None:
                self._sink.responded(self._call, now)

    def _take_chunk_head(self, received: bytes, position: int, now: float) -> int:
        end = received.find(b"\r\n", position)
        if end < 0:
            return position
        try:
            self._left = int(received[position:end].partition(b";")[0], 16)
        except ValueError:
            raise ProtocolBroken("a chunk of an answer has no length") from None
        self._part = _Part.CHUNK if self._left else _Part.TRAILERS
        self._left += 2 if self._left else 0  # the end of the line is part of it
        return end + 2

    def _take_chunk(self, received: bytes, position: int, now: float) -> int:
        if self._left > 2:
            self._left -= 2
            end = self._take_content(received, position, now)
            self._left += 2
            return end
        end = min(len(received), position + self._left)
        self._left -= end - position
        if not self._left:
            self._part = _Part.CHUNK_HEAD
        return end

    def _take_trailers(self, received: bytes, position: int, now: float) -> int:
        end = received.find(b"\r\n", position)
        if end < 0:
            return position
        if end == position:
            self._end(now)
        return end + 2

    def _end(self, now: float) -> None:
        call, self._call = self._call, None
        self._part = _Part.HEAD
        if call is None:
            return
        failure = self._answer.failure
        if self._answer.status != 200:
            failure = Failure(f"HTTP {self._answer.status}", self._answer.text.decode(errors="replace"))
        elif not self._in_streams:
            self._sink.responded(call, now)
        self._sink.ended(call, failure, now)


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()
