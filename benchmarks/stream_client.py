"""Clients of gRPC on bare HTTP/2 frames, each a program of its own on one connection.

``python -m benchmarks.wire_clients KIND PORT METHOD AT_ONCE SECONDS REQUEST ANSWER``: the last are two files,
the body of a request and the right body of its answer. stdout gets one line of JSON; a wrong answer ends the
program with 1. By ``KIND``:

``first``: so many calls at once, each followed by the next; the times of their first messages. ``in-stream``:
one stream, with so many requests in flight inside it. Every request has the same answer, so it does not
matter which one an answer is to.

The status of a call lies in trailers that are not decoded; every byte of its body is compared instead.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gpuserve.bench import http2_client as http2

_RECEIVE_NBYTES: Final = 1 << 18
_STREAM: Final = 1


class ClientFailed(Exception):
    """The server refused a request, answered wrongly, or not at all."""


class Calls:
    """The calls of one connection. Bytes go in, bytes come out; there is no socket and no clock here.

    A call is named by a number of the caller's. What flow control does not let go yet waits inside. ``begun``
    are the calls that had their first byte of an answer in the last ``take``.
    """

    def __init__(self, method: str, request: bytes, answer: bytes, headers: Iterable[str] = ()) -> None:
        more = [(name, value) for name, _, value in (one.partition(":") for one in headers)]
        block = http2.grpc_headers(method, more=more)
        self._headers = http2.frame(http2.HEADERS, http2.END_HEADERS, 0, block)
        self._data = http2.frame(http2.DATA, http2.END_STREAM, 0, request)
        self._request_nbytes = len(request)
        self._window_nbytes = http2.FIRST_WINDOW_NBYTES
        self._answer = answer
        self._next_stream = 1
        self._calls: dict[int, int] = {}
        self._bodies: dict[int, bytes] = {}
        self._waiting: deque[int] = deque()
        self._reader = http2.FrameReader()
        self._replies = bytearray()
        self.begun: list[int] = []

    def ask(self, call: int) -> bytes:
        if self._waiting or self._window_nbytes < self._request_nbytes:
            self._waiting.append(call)
            return b""
        return self._open(call)

    def take(self, data: bytes) -> tuple[list[tuple[int, bool]], bytes]:
        """Read received bytes. Return the calls that end with them, each with whether it was answered, and
        what the connection owes. A call that ends without a body was refused, by a status in its trailers or
        by a reset. Raises ClientFailed: the body of a call is not the right one.
        """
        ended = list[tuple[int, bool]]()
        self.begun = []
        for kind, flags, stream, payload in self._reader.read(data):
            if kind == http2.DATA:
                if (body := self._bodies.get(stream)) is None and payload:
                    self.begun.append(self._calls[stream])
                self._bodies[stream] = (body or b"") + payload
            elif kind == http2.RESET:
                self._bodies.pop(stream, None)
                if stream in self._calls:  # not where it only tells that no more of the request is wanted
                    ended.append((self._calls.pop(stream), False))
            elif kind != http2.HEADERS:
                self._take_control(kind, flags, payload, stream)
            if flags & http2.END_STREAM and kind in {http2.DATA, http2.HEADERS}:
                ended.append(self._end(stream))
        owed = bytes(self._replies)
        self._replies.clear()
        return ended, owed

    def _open(self, call: int) -> bytes:
        stream = self._next_stream
        self._next_stream += 2
        self._calls[stream] = call
        self._window_nbytes -= self._request_nbytes
        number, headers, data = stream.to_bytes(4), self._headers, self._data
        return b"".join((headers[:5], number, headers[9:], data[:5], number, data[9:]))

    def _end(self, stream: int) -> tuple[int, bool]:
        body = self._bodies.pop(stream, b"")
        if body and body != self._answer:
            raise ClientFailed(f"an answer of {len(body)} bytes is not the right one of {len(self._answer)}")
        return self._calls.pop(stream), bool(body)

    def _take_control(self, kind: int, flags: int, payload: bytes, stream: int) -> None:
        if kind == http2.WINDOW_UPDATE and stream == 0:
            self._window_nbytes += int.from_bytes(payload)
            while self._waiting and self._window_nbytes >= self._request_nbytes:
                self._replies += self._open(self._waiting.popleft())
        elif kind in {http2.SETTINGS, http2.PING}:
            self._replies += http2.acknowledge(kind, flags, payload)
        elif kind == http2.GOAWAY:
            raise ClientFailed("the server sent GOAWAY")


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

    def half_close(self) -> bytes:
        return http2.frame(http2.DATA, http2.END_STREAM, _STREAM, b"")

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


_Send = Callable[[bytes], object]
_Receive = Callable[[], bytes]


@contextmanager
def _connected(port: int) -> Iterator[tuple[_Send, _Receive]]:
    """Connect to a port; give the functions that send and receive (never nothing)."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def receive() -> bytes:
            if data := connection.recv(_RECEIVE_NBYTES):
                return data
            raise ClientFailed("the server closed the connection")

        connection.sendall(http2.connection_preface({}))
        yield connection.sendall, receive


def first_responses(
    calls: Calls, at_once: int, seconds: float, send: _Send, receive: _Receive
) -> dict[str, object]:
    """Keep so many calls open for this long, then let them end. Raises ClientFailed: a call was not answered
    right.
    """
    began_at = now = time.perf_counter()
    began_s: dict[int, float] = {}
    first_s: list[float] = []
    opened = ended = 0
    while ended < opened or not opened:
        owed = b""
        while (opened - ended < at_once and now < began_at + seconds) or not opened:
            began_s[opened] = now
            owed += calls.ask(opened)
            opened += 1
        send(owed)
        over, owed = calls.take(receive())
        now = time.perf_counter()
        first_s += [now - began_s.pop(call) for call in calls.begun]
        if not all(answered for _, answered in over):
            raise ClientFailed("the server refused a call")
        ended += len(over)
        send(owed)
    return {"calls": ended, "took_s": time.perf_counter() - began_at, "first_s": first_s}


def in_stream(
    stream: Stream, in_flight: int, seconds: float, send: _Send, receive: _Receive
) -> dict[str, object]:
    """Keep so many requests in flight for this long, then let the stream end. Raises ClientFailed: a request
    was not answered right.
    """

    def exchange(keep: int) -> None:
        """Read what has come, and ask again until so many are in flight."""
        owed = stream.take(receive()) + stream.ask(max(0, keep - stream.in_flight))
        if owed:
            send(owed)

    began_at = time.perf_counter()
    send(stream.open() + stream.ask(in_flight))
    while (took_s := time.perf_counter() - began_at) < seconds:
        exchange(in_flight)
    answers = stream.answers
    while stream.in_flight:
        exchange(0)
    send(stream.half_close())
    while not stream.ended:
        exchange(0)
    return {"answers": answers, "took_s": took_s}


def main(kind: str, port: str, method: str, at_once: str, seconds: str, *files: str) -> int:
    request, answer = (Path(one).read_bytes() for one in files)
    try:
        with _connected(int(port)) as ends:
            if kind == "first":
                result = first_responses(Calls(method, request, answer), int(at_once), float(seconds), *ends)
            else:
                result = in_stream(Stream(method, request, answer), int(at_once), float(seconds), *ends)
    except (ClientFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
