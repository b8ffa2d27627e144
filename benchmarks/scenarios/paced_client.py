"""The open-loop client: a program of its own that sends every request at its time, answered or not.

``python -m benchmarks.scenarios.paced_client PORT METHOD REQUEST ANSWER [HEADER...]``: two files, the body of
a call and the right body of its answer, and more headers of each call, ``name:value``. stdin gets the
schedule as JSON, ``{"at_s": [...], "connection": [...]}``; stdout gets ``Paced`` as JSON. A wrong answer ends
the program with 1.

A latency runs from the time at which the request was *due*, so a client or a server that falls behind
shows. How late the client itself was is told beside it. One thread, no event loop: what is due on a
connection is one system call, and timers are exact to some microseconds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.wire_clients import Calls, ClientFailed
from gpuserve.bench import http2_client as http2

_RECEIVE_NBYTES: Final = 1 << 18
#: From the last request, or the last answer, until the server is given up.
_PATIENCE_S: Final = 20.0
#: For the connections to be told the server's settings.
_LEAD_S: Final = 0.2
_PR_SET_TIMERSLACK: Final = 29
#: Above the lowest, at which a server may run.
_PRIORITY: Final = 10


@dataclass(frozen=True, slots=True)
class Paced:
    """One run. Both lists are in the order of the schedule, in seconds. A request that was refused has an
    infinite latency.

    ``late_s`` is from the time at which a request was due until it was handed to the kernel, and part of its
    latency. ``cpu_s`` is what this program used in ``took_s`` of the wall.
    """

    latency_s: list[float]
    late_s: list[float]
    cpu_s: float
    took_s: float


class Connection:
    def __init__(self, port: int, calls: Calls, epoll: select.epoll) -> None:
        self.calls = calls
        self.unsent = bytearray()
        self._epoll = epoll
        self._is_full = False
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(http2.connection_preface({}))
        self._socket.setblocking(False)
        epoll.register(self.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def flush(self) -> None:
        """Send what the kernel takes of ``unsent``; the rest goes when it takes more."""
        try:
            del self.unsent[: self._socket.send(self.unsent)]
        except BlockingIOError:
            pass
        if bool(self.unsent) != self._is_full:
            self._is_full = not self._is_full
            self._epoll.modify(self.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._is_full else 0))

    def receive(self) -> bytes:
        """What is there. Raises ClientFailed: the server closed the connection."""
        try:
            data = self._socket.recv(_RECEIVE_NBYTES)
        except BlockingIOError:
            return b""
        if data:
            return data
        raise ClientFailed("the server closed the connection")

    def close(self) -> None:
        self._socket.close()


class Run:
    """Sends by the schedule and keeps the times."""

    def __init__(self, at_s: Sequence[float], connection: Sequence[int]) -> None:
        self._at_s = at_s
        self._connection = connection
        self._epoll = select.epoll()  # before the connections: select() takes small descriptors only
        self._connections: list[Connection] = []
        self._by_fd: dict[int, Connection] = {}
        self._next = 0
        self._left = len(at_s)
        self._latency_s = [0.0] * len(at_s)
        self._late_s = [0.0] * len(at_s)

    def run(
        self, port: int, method: str, request: bytes, answer: bytes, headers: Iterable[str] = ()
    ) -> Paced:
        """Connect, send everything and wait for every answer. Raises ClientFailed: not every request was
        answered right; OSError: the server is not there.
        """
        for _ in range(max(self._connection) + 1):
            one = Connection(port, Calls(method, request, answer, headers), self._epoll)
            self._connections.append(one)
            self._by_fd[one.fileno()] = one
        began_cpu_s, began_at = time.process_time(), time.perf_counter() + _LEAD_S
        while self._left:
            self._turn(began_at)
        took_s = time.perf_counter() - began_at
        for one in self._connections:
            one.close()
        return Paced(self._latency_s, self._late_s, time.process_time() - began_cpu_s, took_s)

    def _turn(self, began_at: float) -> None:
        wait_s = _PATIENCE_S
        if self._next < len(self._at_s):
            self._send_due(began_at)
            if self._next < len(self._at_s):
                wait_s = max(0.0, self._at_s[self._next] - (time.perf_counter() - began_at))
        # epoll_wait() counts milliseconds; select() microseconds.
        ready, _, _ = select.select((self._epoll,), (), (), wait_s)
        if ready:
            self._take_ready(began_at)
        elif self._next == len(self._at_s):
            raise ClientFailed(f"{self._left} requests were not answered within {_PATIENCE_S:.0f} s")

    def _send_due(self, began_at: float) -> None:
        at_s, now = self._at_s, time.perf_counter() - began_at
        first, touched = self._next, set[Connection]()
        while self._next < len(at_s) and at_s[self._next] <= now:
            one = self._connections[self._connection[self._next]]
            one.unsent += one.calls.ask(self._next)
            touched.add(one)
            self._next += 1
        for one in touched:
            one.flush()
        if touched:
            now = time.perf_counter() - began_at
            for index in range(first, self._next):
                self._late_s[index] = now - at_s[index]

    def _take_ready(self, began_at: float) -> None:
        for fd, events in self._epoll.poll(0):
            one = self._by_fd[fd]
            if events & ~select.EPOLLOUT:
                ended, owed = one.calls.take(one.receive())
                now = time.perf_counter() - began_at
                for index, answered in ended:
                    self._latency_s[index] = now - self._at_s[index] if answered else math.inf
                self._left -= len(ended)
                one.unsent += owed
            if one.unsent:
                one.flush()


def main(port: str, method: str, request_file: str, answer_file: str, *headers: str) -> int:
    request, answer = Path(request_file).read_bytes(), Path(answer_file).read_bytes()
    schedule = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with suppress(PermissionError):  # a client on a machine of its own would never wait for the server's CPU
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
        # Else it would be woken on the CPU where it slept, whoever of the server has that now.
        os.sched_setaffinity(0, (max(os.sched_getaffinity(0)),))
    gc.disable()  # nothing here makes cycles, and a collection would be somebody's latency
    try:
        run = Run(schedule["at_s"], schedule["connection"])
        paced = run.run(int(port), method, request, answer, headers)
    except (ClientFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    json.dump(asdict(paced), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
