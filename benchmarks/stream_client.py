"""The client that times first responses: a program of its own on one connection, ``streams`` calls at once.

``python -m benchmarks.stream_client PORT METHOD STREAMS SECONDS REQUEST ANSWER``: the last are two files,
the body of one call and the right body of its answer. A call that ends is followed by the next one. stdout
gets one line of JSON; a wrong answer ends the program with 1.

It speaks just the HTTP/2 that this takes, and writes and reads bytes only: a client of grpcio takes some
0.3 ms for a call, which would be most of what is measured. The status of a call lies in trailers that are not
decoded; every byte of its body is compared instead.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_HEAD_NBYTES: Final = 9
_INITIAL_WINDOW: Final = 4
#: Nothing here waits for the flow control: a run of minutes fits.
_WINDOW_NBYTES: Final = (1 << 31) - 1
_FIRST_WINDOW_NBYTES: Final = 65_535
_RECEIVE_NBYTES: Final = 1 << 18


class StreamFailed(Exception):
    """The server refused a call or answered wrongly."""


class Streams:
    """The calls of one connection. Bytes and times go in, bytes come out; there is no socket here."""

    def __init__(self, method: str, request: bytes, answer: bytes) -> None:
        self._headers = _call_headers(method)
        self._request = request
        self._answer = answer
        self._next_id = 1
        self._began_at: dict[int, float] = {}
        self._bodies: dict[int, bytearray] = {}
        self._received = bytearray()
        self._replies = bytearray()
        #: From the opening of each call to the first byte of its first message.
        self.first_s: list[float] = []
        self.ended = 0

    @property
    def under_way(self) -> int:
        """Calls without their end."""
        return len(self._bodies)

    def connect(self) -> bytes:
        """What a connection begins with."""
        settings = struct.pack(">HI", _INITIAL_WINDOW, _WINDOW_NBYTES)
        window = struct.pack(">I", _WINDOW_NBYTES - _FIRST_WINDOW_NBYTES)
        return _PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window)

    def open(self, calls: int, now: float) -> bytes:
        """So many calls, each half-closed after its request."""
        opened = bytearray()
        for _ in range(calls):
            stream = self._next_id
            self._next_id += 2
            self._began_at[stream] = now
            self._bodies[stream] = bytearray()
            opened += _frame(_HEADERS, _END_HEADERS, stream, self._headers)
            opened += _frame(_DATA, _END_STREAM, stream, self._request)
        return bytes(opened)

    def take(self, data: bytes, now: float) -> bytes:
        """What was received at that time; returns what the connection owes for it.

        Raises:
            StreamFailed: a call was refused, or its body is not the right one.
        """
        received = self._received
        received += data
        position = 0
        while len(received) - position >= _HEAD_NBYTES:
            start = position + _HEAD_NBYTES
            end = start + int.from_bytes(received[position : position + 3])
            if end > len(received):
                break
            stream = int.from_bytes(received[position + 5 : start])
            self._take_frame(received[position + 3], received[position + 4], stream, received[start:end], now)
            position = end
        del received[:position]
        replies = bytes(self._replies)
        self._replies.clear()
        return replies

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytearray, now: float) -> None:
        if kind in {_DATA, _HEADERS}:
            if kind == _DATA and payload:
                if stream in self._began_at:
                    self.first_s.append(now - self._began_at.pop(stream))
                self._bodies[stream] += payload
            if flags & _END_STREAM:
                self._end(stream)
        elif kind in {_SETTINGS, _PING} and not flags & _ACK:
            self._replies += _frame(kind, _ACK, 0, b"" if kind == _SETTINGS else bytes(payload))
        elif kind in {_RESET, _GOAWAY}:
            raise StreamFailed(f"the server sent {'GOAWAY' if kind == _GOAWAY else 'RST_STREAM'}")

    def _end(self, stream: int) -> None:
        body = self._bodies.pop(stream)
        if body != self._answer:
            raise StreamFailed(f"an answer of {len(body)} bytes is not the right one of {len(self._answer)}")
        self.ended += 1


def run(
    port: int, method: str, streams: int, seconds: float, request: bytes, answer: bytes
) -> dict[str, object]:
    """Keep so many calls open for this long, then let them end.

    Raises:
        StreamFailed: not every call was answered right.
    """
    calls = Streams(method, request, answer)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began_at = time.perf_counter()
        connection.sendall(calls.connect() + calls.open(streams, began_at))
        while calls.under_way:
            data = connection.recv(_RECEIVE_NBYTES)
            now = time.perf_counter()
            if not data:
                raise StreamFailed("the server closed the connection")
            owed = calls.take(data, now)
            if now < began_at + seconds:
                owed += calls.open(streams - calls.under_way, now)
            if owed:
                connection.sendall(owed)
        took_s = time.perf_counter() - began_at
    return {"calls": calls.ended, "took_s": took_s, "first_s": calls.first_s}


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is in no table and not compressed; both lengths are below 127."""
    return b"".join((b"\0", bytes((len(name),)), name.encode(), bytes((len(value),)), value.encode()))


def _call_headers(method: str) -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "127.0.0.1",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(_literal(name, value) for name, value in headers.items())


def main(port: str, method: str, streams: str, seconds: str, *files: str) -> int:
    """Run and print; returns the exit code."""
    request, answer = (Path(file).read_bytes() for file in files)
    try:
        result = run(int(port), method, int(streams), float(seconds), request, answer)
    except (StreamFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
