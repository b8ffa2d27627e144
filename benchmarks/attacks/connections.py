"""The attacker's connections: raw ones, those that keep to the windows of HTTP/2, and many at once."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from typing import Final

from gpuserve.cli.bench import http2_client as http2
from gpuserve.cli.bench.call_protocols import GrpcCalls, GrpcRequests
from gpuserve.cli.bench.load_generator import Failure, TimedCall

TIMEOUT_S: Final = 5.0
_READ_NBYTES: Final = 256 << 10
#: Before a connection that the server has closed is opened again.
_PAUSE_S: Final = 0.01
#: How often is looked whether a wait is over.
_TURN_S: Final = 0.05
_IDLE_TURN_S: Final = 0.5

Address = tuple[str, int]


def trusting_context() -> ssl.SSLContext:
    """Return a context of TLS that believes every server."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def address(text: str) -> Address:
    """Return the host and the port of ``host:port``."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


@dataclass
class Victim:
    """Where the server listens. ``tls``: a port that speaks TLS. ``pid``, ``config``: the supervisor and the
    configuration file of a server on this machine. ``seconds``: how long the attack takes from the first look
    at what is left of them, when all bodies have been made; ``began`` is called then.
    """

    http: Address
    grpc: Address
    tls: Address
    pid: int = 0
    config: str = ""
    seconds: float = 0.0
    began: Callable[[], object] = field(default=lambda: None, compare=False)

    @cached_property
    def until_s(self) -> float:
        """When the attack is over, by the monotonic clock."""
        self.began()
        return time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def begin(self) -> None:
        """Begin the attack, where nothing looks at what is left of it."""
        _ = self.until_s


class Attack:
    """One connection. What the server sends is thrown away, or left unread."""

    def __init__(self, address: Address, victim: Victim, reads: bool = True) -> None:
        self.socket = socket.socket()
        if not reads:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(TIMEOUT_S)
        try:
            self.socket.connect(address)
        except OSError:
            self.socket.close()
            raise
        self.socket.setblocking(False)
        self._victim = victim
        self._reads = select.POLLIN if reads else 0
        self._poll = select.poll()
        self._poll.register(self.socket, self._reads | select.POLLOUT)

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def pour(self, pieces: Iterable[bytes]) -> None:
        """Send all of it, until the attack is over. Raises OSError: the server closed the connection."""
        for piece in pieces:
            left = memoryview(piece)
            while left and (seconds := self._victim.left_s) > 0:
                self._poll.poll(seconds * 1000)
                self._drop()
                with contextlib.suppress(BlockingIOError):
                    left = left[self.socket.send(left) :]
            if left:
                return

    def drip(self, piece: bytes, every_s: float) -> None:
        """Send a piece again and again. Raises OSError: the server closed the connection."""
        while self._victim.left_s > 0:
            self.pour([piece])
            self.idle(every_s)

    def idle(self, seconds: float) -> None:
        """Do nothing but read, where this one reads. Raises OSError: the server closed the connection."""
        end_s = min(time.monotonic() + seconds, self._victim.until_s)
        while (left_s := end_s - time.monotonic()) > 0:
            self._drop()
            time.sleep(min(left_s, _IDLE_TURN_S))

    def _drop(self) -> None:
        if self._reads:
            with contextlib.suppress(BlockingIOError):
                if not self.socket.recv(_READ_NBYTES):
                    raise ConnectionError("the server closed the connection")


class Calls:
    """gRPC calls of one connection, each of a whole body, within the windows that the server gives."""

    def __init__(
        self, address: Address, headers: bytes, bodies: tuple[bytes, ...], until_s: float, source: str = ""
    ) -> None:
        self.failures: list[Failure] = []
        self.until_s = until_s
        self._calls = GrpcCalls(self, GrpcRequests(headers, bodies, False), http2.HeaderBlocks())
        self._socket = socket.create_connection(address, TIMEOUT_S, (source, 0) if source else None)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._calls.on_connected()
        self.run(lambda: self._calls.has_room)

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def on_response(self, call: TimedCall, now: float) -> None:
        call.responses += 1

    def on_end(self, call: TimedCall, failure: Failure | None, now: float) -> None:
        if failure is not None:
            self.failures.append(failure)

    def begin(self, body: int = 0) -> None:
        """Begin a call, with this one of the bodies; ``run`` sends it."""
        self._calls.start_call(TimedCall(body, 0.0, 0.0))

    def send(self, frames: bytes) -> None:
        self._calls.out += frames

    def answer(self) -> bool:
        """Wait until every call is over; false where the time is over first. Raises OSError as ``run``."""
        self.run(lambda: not self._calls.in_flight)
        return not self._calls.in_flight

    def run(self, is_over: Callable[[], bool]) -> None:
        """Send and read until then, or until the time is over. Raises OSError: the server closed the
        connection.
        """
        while not is_over() and (left_s := self.until_s - time.monotonic()) > 0:
            if not self._calls.is_usable and not self._calls.in_flight:
                raise ConnectionError("the server wants no more calls")
            self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._calls.out else 0))
            for _, events in self._poll.poll(min(left_s, _TURN_S) * 1000):
                self._turn(events)

    def _turn(self, events: int) -> None:
        if events & select.POLLOUT:
            del self._calls.out[: self._socket.send(self._calls.out)]
        if events & ~select.POLLOUT:
            received = self._socket.recv(_READ_NBYTES)
            if not received:
                raise ConnectionError("the server closed the connection")
            self._calls.receive(received, 0.0)


def attack_on(
    victim: Victim, address: Address, n: int, talk: Callable[[Attack], object], reads: bool = True
) -> None:
    """Talk on so many connections at once, each opened again when the server puts an end to it."""

    def one() -> None:
        with Attack(address, victim, reads) as attack:
            talk(attack)

    crowd(victim, n, one)


def ask_on(victim: Victim, headers: bytes, bodies: tuple[bytes, ...], n: int) -> None:
    """Make gRPC calls with these bodies in turn, one after the other on each of so many connections."""

    def talk() -> None:
        with Calls(victim.grpc, headers, bodies, victim.until_s) as calls:
            for body in cycle(range(len(bodies))):
                if victim.left_s <= 0:
                    return
                calls.begin(body)
                calls.answer()

    crowd(victim, n, talk)


def crowd(victim: Victim, n: int, talk: Callable[[], None]) -> None:
    """Do this in so many threads until the attack is over, however often the server puts an end to it."""
    victim.begin()  # once, and not in each of the threads

    def again() -> None:
        while victim.left_s > 0:
            with contextlib.suppress(OSError):
                talk()
            time.sleep(_PAUSE_S)

    threads = [threading.Thread(target=again) for _ in range(n)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
