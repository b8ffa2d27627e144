"""A client of one gRPC stream with many requests in flight, on bare HTTP/2 frames.

``python -m benchmarks.stream_client PORT METHOD AT_ONCE SECONDS REQUEST ANSWER``: the last are two files, the
body of a request and the right body of its answer. Every request has the same answer. stdout gets one line of
JSON; a wrong answer ends the program with 1. The status of the call is in trailers, which are not decoded;
every byte of the answers is compared instead.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Final

from gpuserve.cli.bench import http2_client as http2

_RECEIVE_NBYTES: Final = 1 << 18
_STREAM: Final = 1


class ClientFailed(Exception):
    """The server refused a request, answered wrongly, or not at all."""


class Stream:
    """One stream. Bytes go in, bytes come out; there is no socket here.

    ``in_flight`` are the requests without their answer; some of them may wait for the flow control.
    """

    def __init__(self, method: str, request: bytes, answer: bytes) -> None:
        self._headers = http2.grpc_headers(method)
        self._frame = http2.frame(http2.DATA, 0, _STREAM, request)
        self._request_nbytes = len(request)
        self._answer = answer
        self._reader = http2.FrameReader()
        self._body = bytearray()
        #: Bytes that may be sent: on the connection (0) and on the stream.
        self._windows = {0: http2.FIRST_WINDOW_NBYTES, _STREAM: http2.FIRST_WINDOW_NBYTES}
        self._first_window = http2.FIRST_WINDOW_NBYTES
        self._waiting = 0
        self.in_flight = 0
        self.answers = 0
        self.ended = False

    def open(self) -> bytes:
        return http2.frame(http2.HEADERS, http2.END_HEADERS, _STREAM, self._headers)

    def ask(self, requests: int) -> bytes:
        """Return so many more requests, as far as the flow control lets them go; a later call returns the
        others.
        """
        self.in_flight += requests
        self._waiting += requests
        ready = min(self._waiting, min(self._windows.values()) // self._request_nbytes)
        self._waiting -= ready
        for stream in self._windows:
            self._windows[stream] -= ready * self._request_nbytes
        return self._frame * ready

    def take(self, data: bytes) -> bytes:
        """Read received bytes; return what the connection owes for them. Raises ClientFailed: the stream was
        refused, or an answer is not the right one.
        """
        replies = b""
        for kind, flags, stream, payload in self._reader.read(data):
            if kind == http2.DATA:
                self._body += payload
            elif kind == http2.WINDOW_UPDATE:
                self._windows[stream] += int.from_bytes(payload)
            elif kind in {http2.RESET, http2.GOAWAY}:
                raise ClientFailed(f"the server sent {'GOAWAY' if kind == http2.GOAWAY else 'RST_STREAM'}")
            elif kind in {http2.SETTINGS, http2.PING}:
                if kind == http2.SETTINGS and not flags & http2.ACK:
                    self._take_settings(payload)
                replies += http2.acknowledge(kind, flags, payload)
            if kind in {http2.DATA, http2.HEADERS} and flags & http2.END_STREAM:
                self.ended = True
        self._take_answers()
        return replies

    def _take_answers(self) -> None:
        """Compare the whole answers that there are; what is left is the start of the next one."""
        answers = len(self._body) // len(self._answer)
        nbytes = answers * len(self._answer)
        if self._body[:nbytes] != self._answer * answers or answers > self.in_flight:
            raise ClientFailed(f"answer {self.answers + 1} or one of the {answers} from there on is wrong")
        del self._body[:nbytes]
        self.in_flight -= answers
        self.answers += answers
        if self.ended and (self.in_flight or self._body):
            raise ClientFailed(f"the stream ended before {self.in_flight} of its answers")

    def _take_settings(self, payload: bytes) -> None:
        for number, value in http2.parse_settings(payload):
            if number == http2.INITIAL_WINDOW:
                self._windows[_STREAM] += value - self._first_window
                self._first_window = value


def in_stream(stream: Stream, in_flight: int, seconds: float, connection: socket.socket) -> dict[str, object]:
    """Keep so many requests in flight for this long, then let the stream end. Raises ClientFailed: a request
    was not answered right.
    """

    def exchange(keep: int) -> None:
        """Read what has come, and ask again until so many are in flight."""
        if not (data := connection.recv(_RECEIVE_NBYTES)):
            raise ClientFailed("the server closed the connection")
        if owed := stream.take(data) + stream.ask(max(0, keep - stream.in_flight)):
            connection.sendall(owed)

    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(http2.connection_preface({}))
    began_at = time.perf_counter()
    connection.sendall(stream.open() + stream.ask(in_flight))
    while (took_s := time.perf_counter() - began_at) < seconds:
        exchange(in_flight)
    answers = stream.answers
    while stream.in_flight:
        exchange(0)
    connection.sendall(http2.frame(http2.DATA, http2.END_STREAM, _STREAM, b""))
    while not stream.ended:
        exchange(0)
    return {"answers": answers, "took_s": took_s}


def main(port: str, method: str, at_once: str, seconds: str, *files: str) -> int:
    request, answer = (Path(one).read_bytes() for one in files)
    try:
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            result = in_stream(Stream(method, request, answer), int(at_once), float(seconds), connection)
    except (ClientFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
