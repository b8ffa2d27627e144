"""The client that keeps many requests in flight inside one stream: a program of its own.

``python -m benchmarks.in_stream_client PORT METHOD IN_FLIGHT SECONDS REQUEST ANSWER``: the last are two
files, one message of the stream and the right answer to it, both as they lie in the body of a call. Each
answer is followed by the next request. stdout gets one line of JSON; a wrong answer ends the program with 1.

Every request has the same answer, so it does not matter which one an answer is to.
"""

from __future__ import annotations

import sys
import time
from typing import Final

from benchmarks.stream_client import StreamFailed, connected, control_reply, main
from gpuserve.bench import http2_client as http2

_STREAM: Final = 1


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
        self._replies = bytearray()
        #: Bytes that may be sent: on the connection (0) and on the stream.
        self._windows = {0: http2.FIRST_WINDOW_NBYTES, _STREAM: http2.FIRST_WINDOW_NBYTES}
        self._first_window = http2.FIRST_WINDOW_NBYTES
        self._waiting = 0
        self.in_flight = 0
        self.answers = 0
        self.ended = False

    def open(self) -> bytes:
        """The start of the connection and of its stream."""
        headers = http2.frame(http2.HEADERS, http2.END_HEADERS, _STREAM, self._headers)
        return http2.connection_preface({}) + headers

    def ask(self, requests: int) -> bytes:
        """So many more requests, as far as the flow control lets them go; the others go with a later call."""
        self.in_flight += requests
        self._waiting += requests
        ready = min(self._waiting, min(self._windows.values()) // self._request_nbytes)
        self._waiting -= ready
        for stream in self._windows:
            self._windows[stream] -= ready * self._request_nbytes
        return self._frame * ready

    def half_close(self) -> bytes:
        """The frame that says that no more requests come."""
        return http2.frame(http2.DATA, http2.END_STREAM, _STREAM, b"")

    def take(self, data: bytes) -> bytes:
        """What was received; returns what the connection owes for it. Raises StreamFailed: the stream was
        refused, or an answer is not the right one.
        """
        for kind, flags, stream, payload in self._reader.read(data):
            if kind == http2.DATA:
                self._body += payload
            else:
                self._take_control(kind, flags, stream, payload)
            if kind in {http2.DATA, http2.HEADERS} and flags & http2.END_STREAM:
                self.ended = True
        self._take_answers()
        replies = bytes(self._replies)
        self._replies.clear()
        return replies

    def _take_answers(self) -> None:
        """Compare the whole answers that there are; what is left is the start of the next one."""
        answers = len(self._body) // len(self._answer)
        nbytes = answers * len(self._answer)
        if self._body[:nbytes] != self._answer * answers or answers > self.in_flight:
            raise StreamFailed(f"answer {self.answers + 1} or one of the {answers} from there on is wrong")
        del self._body[:nbytes]
        self.in_flight -= answers
        self.answers += answers
        if self.ended and (self.in_flight or self._body):
            raise StreamFailed(f"the stream ended before {self.in_flight} of its answers")

    def _take_control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == http2.WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload)
        elif kind != http2.HEADERS:
            if kind == http2.SETTINGS and not flags & http2.ACK:
                self._take_settings(payload)
            self._replies += control_reply(kind, flags, payload)

    def _take_settings(self, payload: bytes) -> None:
        for number, value in http2.parse_settings(payload):
            if number == http2.INITIAL_WINDOW:
                self._windows[_STREAM] += value - self._first_window
                self._first_window = value


def run(
    port: int, method: str, in_flight: int, seconds: float, request: bytes, answer: bytes
) -> dict[str, object]:
    """Keep so many requests in flight for this long, then let the stream end. Raises StreamFailed: not every
    request was answered right.
    """
    stream = Stream(method, request, answer)
    with connected(port) as (send, receive):

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


if __name__ == "__main__":
    sys.exit(main(run, sys.argv[1:]))
