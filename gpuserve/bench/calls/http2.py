"""The client's side of HTTP/2, for the load generator, ``benchmarks`` and peers of tests. Bytes in, bytes
out. None of the server's own HTTP/2 is in it, so that one checks the other.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK, END_STREAM, END_HEADERS, PADDED, PRIORITIZED = 0x1, 0x1, 0x4, 0x8, 0x20
#: Numbers of settings.
TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = range(1, 6)
HEAD_NBYTES: Final = 9
#: What may be sent on a connection, and on a stream, before the peer has said more.
FIRST_WINDOW_NBYTES: Final = 65_535
FIRST_FRAME_NBYTES: Final = 16_384
#: The largest window: with it the server never waits for this client.
WINDOW_NBYTES: Final = (1 << 31) - 1
MAX_STREAM_ID: Final = (1 << 31) - 1
#: The payload of RST_STREAM for a call that is given up.
CANCELLED: Final = (8).to_bytes(4)
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">HBBBL")
_LONGEST = 127


def head(nbytes: int, kind: int, flags: int, stream: int) -> bytes:
    """The nine bytes before a payload of ``nbytes``."""
    return _HEAD.pack(nbytes >> 8, nbytes & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return head(len(payload), kind, flags, stream) + payload


def settings_frame(settings: Mapping[int, int] | Iterable[tuple[int, int]] = ()) -> bytes:
    pairs = settings.items() if isinstance(settings, Mapping) else settings
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *pair) for pair in pairs))


def opening(settings: Mapping[int, int]) -> bytes:
    """What a connection begins with: the preface, these settings, and the largest windows."""
    more = window_update(0, WINDOW_NBYTES - FIRST_WINDOW_NBYTES)
    return PREFACE + settings_frame({INITIAL_WINDOW: WINDOW_NBYTES, **settings}) + more


def window_update(stream: int, nbytes: int) -> bytes:
    """Lets the server send ``nbytes`` more on a stream, or with 0 on the connection."""
    return frame(WINDOW_UPDATE, 0, stream, nbytes.to_bytes(4))


def settings_of(payload: bytes) -> Iterator[tuple[int, int]]:
    """(number, value) of each setting in the payload of a SETTINGS frame."""
    found: Iterator[tuple[int, int]] = struct.iter_unpack(">HI", payload)
    return found


def acknowledgement(kind: int, flags: int, payload: bytes) -> bytes:
    """What the client owes for a SETTINGS or PING frame; empty where that was an acknowledgement itself."""
    if flags & ACK:
        return b""
    return frame(kind, ACK, 0, b"" if kind == SETTINGS else payload)


def grpc_headers(
    path: str, authority: str = "127.0.0.1", scheme: str = "http", more: Iterable[tuple[str, str]] = ()
) -> bytes:
    """The header block of a gRPC call."""
    return header_block(
        [
            (":method", "POST"),
            (":scheme", scheme),
            (":path", path),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *more,
        ]
    )


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    """Headers in order, none of them in a table and none compressed."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _text(value: str) -> bytes:
    """A length of HPACK with a prefix of seven bits, and the bytes."""
    data = value.encode()
    nbytes = len(data)
    if nbytes < _LONGEST:
        return bytes((nbytes,)) + data
    prefix, rest = bytearray((_LONGEST,)), nbytes - _LONGEST
    while rest >= 128:
        prefix.append(rest & 127 | 128)
        rest >>= 7
    prefix.append(rest)
    return bytes(prefix) + data


class FrameReader:
    """Splits what comes on a connection into frames; the start of the next one is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """(kind, flags, stream, payload) of every frame that is whole."""
        received = self._rest + data if self._rest else data
        position, total = 0, len(received)
        while total - position >= HEAD_NBYTES:
            start = position + HEAD_NBYTES
            end = start + int.from_bytes(received[position : position + 3])
            if end > total:
                break
            stream = int.from_bytes(received[position + 5 : start]) & MAX_STREAM_ID
            yield received[position + 3], received[position + 4], stream, received[start:end]
            position = end
        self._rest = received[position:]


class SendWindows:
    """The flow control of what is sent: bodies wait for the windows; what may go is added to ``out``."""

    def __init__(self, out: bytearray) -> None:
        self._out = out
        self._connection_nbytes = self._first_nbytes = FIRST_WINDOW_NBYTES
        self._max_frame_nbytes = FIRST_FRAME_NBYTES
        self._streams: dict[int, int] = {}
        self._unsent: dict[int, memoryview] = {}
        self._stalled: deque[int] = deque()

    def send(self, stream: int, body: bytes) -> None:
        """Send the body of a new stream, as far as it may go now."""
        nbytes = len(body)
        self._streams[stream] = self._first_nbytes
        if (
            nbytes <= self._max_frame_nbytes
            and nbytes <= self._connection_nbytes
            and nbytes <= self._first_nbytes
        ):
            self._connection_nbytes -= nbytes
            self._out += head(nbytes, DATA, END_STREAM, stream)
            self._out += body
            return
        self._unsent[stream] = memoryview(body)
        self._stalled.append(stream)
        self._send_stalled()

    def forget(self, stream: int) -> bool:
        """Drop a stream that has ended; returns whether its body was not sent whole."""
        del self._streams[stream]
        return self._unsent.pop(stream, None) is not None

    def widen(self, stream: int, nbytes: int) -> None:
        """Take a WINDOW_UPDATE of the server."""
        if stream == 0:
            self._connection_nbytes += nbytes
        elif stream in self._streams:
            self._streams[stream] += nbytes
        if self._stalled:
            self._send_stalled()

    def take_setting(self, number: int, value: int) -> None:
        """Take one of the server's settings; those that are not about flow control change nothing."""
        if number == MAX_FRAME:
            self._max_frame_nbytes = value
        elif number == INITIAL_WINDOW:
            for stream in self._streams:
                self._streams[stream] += value - self._first_nbytes
            self._first_nbytes = value
        self._send_stalled()

    def _send_stalled(self) -> None:
        for _ in range(len(self._stalled)):
            stream = self._stalled.popleft()
            if stream in self._unsent and not self._send_part(stream):
                self._stalled.append(stream)

    def _send_part(self, stream: int) -> bool:
        """Returns whether the body is sent whole."""
        rest = self._unsent[stream]
        while True:
            limit = min(self._connection_nbytes, self._streams[stream], self._max_frame_nbytes)
            nbytes = min(len(rest), limit)
            if nbytes <= 0:
                self._unsent[stream] = rest
                return False
            is_last = nbytes == len(rest)
            self._out += head(nbytes, DATA, END_STREAM if is_last else 0, stream)
            self._out += rest[:nbytes]
            self._connection_nbytes -= nbytes
            self._streams[stream] -= nbytes
            if is_last:
                del self._unsent[stream]
                return True
            rest = rest[nbytes:]


class HeaderBlocks:
    """What the server's header blocks say, each distinct one decoded once: with a header table of size 0,
    which the client must have announced, equal blocks mean the same.
    """

    _MAX_KEPT: Final = 4096

    def __init__(self) -> None:
        self._known: dict[bytes, dict[str, str]] = {}

    def read(self, block: bytes) -> dict[str, str]:
        """The headers of a block; ValueError: it is none, or uses the table that it was told not to use."""
        found = self._known.get(block)
        if found is None:
            if len(self._known) >= self._MAX_KEPT:  # each answer has a header of its own
                self._known.clear()
            found = self._known[block] = _decoded(block)
        return found


def _decoded(block: bytes) -> dict[str, str]:
    import hpack

    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = decoder.header_table_size = 0
    try:
        pairs = decoder.decode(block, raw=True)
    except hpack.HPACKError as error:
        raise ValueError(f"the headers of an answer cannot be read: {error}") from None
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
