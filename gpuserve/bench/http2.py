"""The HTTP/2 and HPACK that the load generator speaks: frames, the opening, header blocks. No socket.

The client announces a header table of size 0, so every block of the server's stands for itself and equal
blocks mean the same: what a block says is looked up by its bytes, and decoded once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ACK, END_STREAM, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32
TABLE_SIZE, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 1, 3, 4, 5  #: numbers of settings
HEAD_NBYTES: Final = 9
FIRST_WINDOW_NBYTES: Final = 65_535
FIRST_FRAME_NBYTES: Final = 16_384
#: What the server may send without asking; what it used is given back by the half.
WINDOW_NBYTES: Final = (1 << 31) - 1
CANCELLED: Final = (8).to_bytes(4)
_FRAME_NBYTES: Final = 1 << 20
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">HBBBL")
_LONGEST = 127


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return head(len(payload), kind, flags, stream) + payload


def head(nbytes: int, kind: int, flags: int, stream: int) -> bytes:
    """The head of a frame of so many bytes."""
    return _HEAD.pack(nbytes >> 8, nbytes & 0xFF, kind, flags, stream)


def opening() -> bytes:
    """What a connection begins with."""
    settings = struct.pack(">HIHIHI", TABLE_SIZE, 0, INITIAL_WINDOW, WINDOW_NBYTES, MAX_FRAME, _FRAME_NBYTES)
    return _PREFACE + frame(SETTINGS, 0, 0, settings) + window_update(0, WINDOW_NBYTES - FIRST_WINDOW_NBYTES)


def window_update(stream: int, nbytes: int) -> bytes:
    """The server may send so many more bytes."""
    return frame(WINDOW_UPDATE, 0, stream, nbytes.to_bytes(4))


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


class HeaderBlocks:
    """What the server's header blocks say, each distinct one decoded once."""

    _MAX_KEPT: Final = 4096

    def __init__(self) -> None:
        self._known: dict[bytes, dict[str, str]] = {}

    def read(self, block: bytes) -> dict[str, str]:
        """The headers of a block.

        Raises:
            ValueError: it is none, or the server uses a table that it was told not to use.
        """
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
