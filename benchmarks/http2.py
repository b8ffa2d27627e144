"""The HTTP/2 that the clients written here speak: frames, the opening of a connection, the headers of a call.

Bytes in, bytes out; no socket and no state. A client of grpcio takes some 0.3 ms for a call, which would be
most of what is measured.
"""

from __future__ import annotations

import struct
from typing import Final

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
HEAD_NBYTES: Final = 9
INITIAL_WINDOW: Final = 4  #: the setting of this number
#: What may be sent on a connection, and on a stream, before the peer has said more.
FIRST_WINDOW_NBYTES: Final = 65_535
#: What the server may send: no run waits for this flow control.
_WINDOW_NBYTES: Final = (1 << 31) - 1
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def connection_opening() -> bytes:
    """What a connection begins with."""
    settings = struct.pack(">HI", INITIAL_WINDOW, _WINDOW_NBYTES)
    window = struct.pack(">I", _WINDOW_NBYTES - FIRST_WINDOW_NBYTES)
    return _PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window)


def call_headers(method: str) -> bytes:
    """The header block of a gRPC call."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "127.0.0.1",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(_literal(name, value) for name, value in headers.items())


def _literal(name: str, value: str) -> bytes:
    """A header that is in no table and not compressed; both lengths are below 127."""
    return b"".join((b"\0", bytes((len(name),)), name.encode(), bytes((len(value),)), value.encode()))
