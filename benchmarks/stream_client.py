"""The client that times first responses: a program of its own on one connection, ``streams`` calls at once.

``python -m benchmarks.stream_client PORT METHOD STREAMS SECONDS REQUEST ANSWER``: the last are two files,
the body of one call and the right body of its answer. A call that ends is followed by the next one. stdout
gets one line of JSON; a wrong answer ends the program with 1.

The status of a call lies in trailers that are not decoded; every byte of its body is compared instead.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Final

from gpuserve.bench import http2_client as http2

_RECEIVE_NBYTES: Final = 1 << 18


class StreamFailed(Exception):
    """The server refused a call or answered wrongly."""


class Streams:
    """The calls of one connection. Bytes and times go in, bytes come out; there is no socket here."""

    def __init__(self, method: str, request: bytes, answer: bytes) -> None:
        self._headers = http2.grpc_headers(method)
        self._request = request
        self._answer = answer
        self._next_id = 1
        self._began_at: dict[int, float] = {}
        self._bodies: dict[int, bytearray] = {}
        self._reader = http2.FrameReader()
        self._replies = bytearray()
        #: From the opening of each call to the first byte of its first message.
        self.first_s: list[float] = []
        self.ended = 0

    @property
    def under_way(self) -> int:
        """The number of calls that have not ended."""
        return len(self._bodies)

    def open(self, calls: int, now: float) -> bytes:
        """So many calls, each half-closed after its request."""
        opened = bytearray()
        for _ in range(calls):
            stream = self._next_id
            self._next_id += 2
            self._began_at[stream] = now
            self._bodies[stream] = bytearray()
            opened += http2.frame(http2.HEADERS, http2.END_HEADERS, stream, self._headers)
            opened += http2.frame(http2.DATA, http2.END_STREAM, stream, self._request)
        return bytes(opened)

    def take(self, data: bytes, now: float) -> bytes:
        """What was received at that time; returns what the connection owes for it.

        Raises:
            StreamFailed: a call was refused, or its body is not the right one.
        """
        for kind, flags, stream, payload in self._reader.read(data):
            self._take_frame(kind, flags, stream, payload, now)
        replies = bytes(self._replies)
        self._replies.clear()
        return replies

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytes, now: float) -> None:
        if kind in {http2.DATA, http2.HEADERS}:
            if kind == http2.DATA and payload:
                if stream in self._began_at:
                    self.first_s.append(now - self._began_at.pop(stream))
                self._bodies[stream] += payload
            if flags & http2.END_STREAM:
                self._end(stream)
        elif kind in {http2.SETTINGS, http2.PING}:
            self._replies += http2.acknowledge(kind, flags, payload)
        elif kind in {http2.RESET, http2.GOAWAY}:
            raise StreamFailed(f"the server sent {'GOAWAY' if kind == http2.GOAWAY else 'RST_STREAM'}")

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
        connection.sendall(http2.connection_preface({}) + calls.open(streams, began_at))
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
