"""The client that times first responses: a program of its own on one connection, ``streams`` calls at once.

``python -m benchmarks.stream_client PORT METHOD STREAMS SECONDS REQUEST ANSWER``: the last are two files, the
body of one call and the right body of its answer. A call that ends is followed by the next one. stdout gets
one line of JSON; a wrong answer ends the program with 1.

The status of a call lies in trailers that are not decoded; every byte of its body is compared instead.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gpuserve.bench import http2_client as http2

_RECEIVE_NBYTES: Final = 1 << 18


class StreamFailed(Exception):
    """The server refused a call, ended it too early or answered wrongly."""


def control_reply(kind: int, flags: int, payload: bytes) -> bytes:
    """Return the reply to a frame that is neither DATA nor HEADERS; raise StreamFailed if it ends a call."""
    if kind in {http2.RESET, http2.GOAWAY}:
        raise StreamFailed(f"the server sent {'GOAWAY' if kind == http2.GOAWAY else 'RST_STREAM'}")
    return http2.acknowledge(kind, flags, payload) if kind in {http2.SETTINGS, http2.PING} else b""


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
        #: From the opening of each call to the first byte of its first message.
        self.first_s: list[float] = []
        self.ended = 0

    @property
    def under_way(self) -> int:
        """The number of calls that have not ended."""
        return len(self._bodies)

    def open(self, calls: int, now: float) -> bytes:
        """Open so many calls, each half-closed after its request."""
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
        """Read received bytes; return the replies that the connection owes. Raises StreamFailed: a call was
        refused, or its body is not the right one.
        """
        replies = b""
        for kind, flags, stream, payload in self._reader.read(data):
            if kind == http2.DATA and payload:
                if stream in self._began_at:
                    self.first_s.append(now - self._began_at.pop(stream))
                self._bodies[stream] += payload
            elif kind not in {http2.DATA, http2.HEADERS}:
                replies += control_reply(kind, flags, payload)
            if kind in {http2.DATA, http2.HEADERS} and flags & http2.END_STREAM:
                self._end(stream)
        return replies

    def _end(self, stream: int) -> None:
        body = self._bodies.pop(stream)
        if body != self._answer:
            raise StreamFailed(f"an answer of {len(body)} bytes is not the right one of {len(self._answer)}")
        self.ended += 1


@contextmanager
def connected(port: int) -> Iterator[tuple[Callable[[bytes], object], Callable[[], bytes]]]:
    """Connect to a port; give the functions that send and receive (never nothing)."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def receive() -> bytes:
            if data := connection.recv(_RECEIVE_NBYTES):
                return data
            raise StreamFailed("the server closed the connection")

        yield connection.sendall, receive


def run(
    port: int, method: str, streams: int, seconds: float, request: bytes, answer: bytes
) -> dict[str, object]:
    """Keep so many calls open for this long, then let them end. Raises StreamFailed: not every call was
    answered right.
    """
    calls = Streams(method, request, answer)
    with connected(port) as (send, receive):
        began_at = time.perf_counter()
        send(http2.connection_preface({}) + calls.open(streams, began_at))
        while calls.under_way:
            data, now = receive(), time.perf_counter()
            owed = calls.take(data, now)
            if now < began_at + seconds:
                owed += calls.open(streams - calls.under_way, now)
            if owed:
                send(owed)
        took_s = time.perf_counter() - began_at
    return {"calls": calls.ended, "took_s": took_s, "first_s": calls.first_s}


def main(runs: Callable[..., dict[str, object]], arguments: Sequence[str]) -> int:
    """Run a client with the arguments of its command line and print; return the exit code."""
    port, method, at_once, seconds, *files = arguments
    try:
        result = runs(
            int(port), method, int(at_once), float(seconds), *(Path(one).read_bytes() for one in files)
        )
    except (StreamFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(run, sys.argv[1:]))
