"""The client side of HTTP/2, for the load generator, ``benchmarks`` and peers of tests. Bytes in, bytes out.
It shares no code with the server's HTTP/2, so that each checks the other.
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
#: The initial windows of a connection and of a stream, and the initial largest frame (RFC 9113).
FIRST_WINDOW_NBYTES: Final = 65_535
FIRST_FRAME_NBYTES: Final = 16_384
#: The largest window: with it the server never waits for this client.
WINDOW_NBYTES: Final = (1 << 31) - 1
MAX_STREAM_ID: Final = (1 << 31) - 1
#: The payload of RST_STREAM for a cancelled call.
CANCELLED: Final = (8).to_bytes(4)
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">HBBBL")
_SHORT_LENGTHS = 127


def frame_head(nbytes: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the nine bytes before a payload of ``nbytes``."""
    return _HEAD.pack(nbytes >> 8, nbytes & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return frame_head(len(payload), kind, flags, stream) + payload


def settings_frame(settings: Mapping[int, int] | Iterable[tuple[int, int]] = ()) -> bytes:
    pairs = settings.items() if isinstance(settings, Mapping) else settings
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *pair) for pair in pairs))


def connection_preface(settings: Mapping[int, int]) -> bytes:
    """Return the first bytes of a connection: the preface, these settings, and the largest windows."""
    more = window_update(0, WINDOW_NBYTES - FIRST_WINDOW_NBYTES)
    return PREFACE + settings_frame({INITIAL_WINDOW: WINDOW_NBYTES, **settings}) + more


def window_update(stream: int, nbytes: int) -> bytes:
    """Return a frame that allows the server ``nbytes`` more on a stream; 0: on the connection."""
    return frame(WINDOW_UPDATE, 0, stream, nbytes.to_bytes(4))


def parse_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Return (number, value) of each setting in the payload of a SETTINGS frame."""
    found: Iterator[tuple[int, int]] = struct.iter_unpack(">HI", payload)
    return found


def acknowledge(kind: int, flags: int, payload: bytes) -> bytes:
    """Return the acknowledgement of a SETTINGS or PING frame, or nothing for an acknowledgement."""
    if flags & ACK:
        return b""
    return frame(kind, ACK, 0, b"" if kind == SETTINGS else payload)


def grpc_headers(
    path: str, authority: str = "127.0.0.1", scheme: str = "http", more: Iterable[tuple[str, str]] = ()
) -> bytes:
    """Return the header block of a gRPC call."""
    own = {":method": "POST", ":scheme": scheme, ":path": path, ":authority": authority}
    return header_block([*own.items(), ("content-type", "application/grpc"), ("te", "trailers"), *more])


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return a block of headers in this order, without compression and without the dynamic table."""
    return b"".join(b"\0" + _hpack_string(name) + _hpack_string(value) for name, value in headers)


def _hpack_string(value: str) -> bytes:
    data = value.encode()
    nbytes = len(data)
    if nbytes < _SHORT_LENGTHS:
        return bytes((nbytes,)) + data
    prefix, rest = bytearray((_SHORT_LENGTHS,)), nbytes - _SHORT_LENGTHS
    while rest >= 128:
        prefix.append(rest & 127 | 128)
        rest >>= 7
    prefix.append(rest)
    return bytes(prefix) + data


class FrameReader:
    """A splitter of received bytes into frames; an incomplete frame is kept for the next call."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (kind, flags, stream, payload) of every complete frame."""
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
    """The flow control of sent bodies, which wait for the windows. Allowed bytes go to ``out``."""

    def __init__(self, out: bytearray) -> None:
        self._out = out
        self._connection_nbytes = self._first_nbytes = FIRST_WINDOW_NBYTES
        self._max_frame_nbytes = FIRST_FRAME_NBYTES
        self._streams: dict[int, int] = {}
        self._unsent: dict[int, memoryview] = {}
        self._stalled: deque[int] = deque()

    def send(self, stream: int, body: bytes) -> None:
        """Send the body of a new stream, as far as the windows allow."""
        nbytes = len(body)
        self._streams[stream] = self._first_nbytes
        if nbytes <= min(self._max_frame_nbytes, self._connection_nbytes, self._first_nbytes):
            self._connection_nbytes -= nbytes
            self._out += frame_head(nbytes, DATA, END_STREAM, stream)
            self._out += body
            return
        self._unsent[stream] = memoryview(body)
        self._stalled.append(stream)
        self._send_stalled()

    def forget(self, stream: int) -> bool:
        """Drop an ended stream; return whether a part of its body is unsent."""
        del self._streams[stream]
        return self._unsent.pop(stream, None) is not None

    def add_window(self, stream: int, nbytes: int) -> None:
        """Process a WINDOW_UPDATE of the server."""
        if stream == 0:
            self._connection_nbytes += nbytes
        elif stream in self._streams:
            self._streams[stream] += nbytes
        if self._stalled:
            self._send_stalled()

    def apply_setting(self, number: int, value: int) -> None:
        """Process a setting of the server; settings without an effect on flow control are ignored."""
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
        """Send as much of a body as the windows allow; return whether the body is complete."""
        rest = self._unsent[stream]
        while True:
            limit = min(self._connection_nbytes, self._streams[stream], self._max_frame_nbytes)
            nbytes = min(len(rest), limit)
            if nbytes <= 0:
                self._unsent[stream] = rest
                return False
            is_last = nbytes == len(rest)
            self._out += frame_head(nbytes, DATA, END_STREAM if is_last else 0, stream)
            self._out += rest[:nbytes]
            self._connection_nbytes -= nbytes
            self._streams[stream] -= nbytes
            if is_last:
                del self._unsent[stream]
                return True
            rest = rest[nbytes:]


class HeaderBlocks:
    """A cache of decoded header blocks. The client must announce a header table of size 0."""

    _MAX_KEPT: Final = 4096

    def __init__(self) -> None:
        self._known: dict[bytes, dict[str, str]] = {}

    def read(self, block: bytes) -> dict[str, str]:
        """Return the headers of a block. Raise ValueError if it is malformed or uses the header table."""
        found = self._known.get(block)
        if found is None:
            if len(self._known) >= self._MAX_KEPT:  # the server sends a distinct header with each answer
                self._known.clear()
            found = self._known[block] = _decode_block(block)
        return found


def _decode_block(block: bytes) -> dict[str, str]:
    import hpack

    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = decoder.header_table_size = 0
    try:
        pairs = decoder.decode(block, raw=True)
    except hpack.HPACKError as error:
        raise ValueError(f"the headers of an answer cannot be read: {error}") from None
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
