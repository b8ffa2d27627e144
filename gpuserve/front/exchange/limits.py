"""What connections may take of the server, and the account of those that were refused or closed for it. A new
descriptor is the lowest that is free: its number tells how many are in use.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Final

from gpuserve.core.errors import ResourceExhausted
from gpuserve.front.exchange.bounded_log import BoundedLog
from gpuserve.front.exchange.exchange import Exchange
from gpuserve.front.exchange.request_rates import RequestRates

#: Descriptors that are kept for the front itself where it has many; where it has few, the same part of them.
SPARE_DESCRIPTORS: Final = 256
_MANY_DESCRIPTORS: Final = 1024
#: Of all connections that there can be, what one address may have.
_PART_OF_ADDRESS: Final = 0.75
#: A stream of gRPC counts once more for so much of its head.
_HEAD_NBYTES: Final = 8 << 10


@dataclass(slots=True)
class Limits:
    """The settings of the same names (``gpuserve/config/settings/server.py``). All connections read one object of
    these, which ``Admission.adjust`` changes.
    """

    max_connections: int = 16384
    max_connections_per_address: int = 8192
    max_streams: int = 16384
    max_half_requests: int = 16384
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 300.0
    body_grace_s: float = 20.0
    min_body_rate: int = 500
    answer_grace_s: float = 300.0
    min_answer_rate: int = 100
    max_unsent_nbytes: int = 128 << 20
    max_requests_per_s: int | None = None
    max_request_burst: int | None = None


def slow_body(limits: Limits) -> str:
    """What is answered to a request whose body comes too slowly."""
    return (
        f"the request body did not come in time: expected {limits.min_body_rate} bytes a second over any "
        f"{limits.body_grace_s:g} s, got less"
    )


class Admission:
    """Says which connections are taken, and counts the others by the reason. ``n_processes`` have them, each
    up to ``n_descriptors``.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        n_descriptors: int | None = None,
        n_spare: int = SPARE_DESCRIPTORS,
        clock: Callable[[], float] = time.monotonic,
        n_processes: int = 1,
        rates: RequestRates | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.n_open = 0
        self.refused = dict.fromkeys(("connections", "address", "descriptors", "streams"), 0)
        self.streams = OpenStreams(self)
        self.rates = rates or RequestRates()
        #: Connections, and requests, that were ended for what was waited for too long.
        self.late = dict.fromkeys(("idle", "head", "body", "answer", "handshake"), 0)
        #: What of answers waits on all connections until windows of HTTP/2 let it through.
        self.held_nbytes = 0
        #: What clients have not read of their answers, by transport, as of the last look.
        self.unsent_nbytes: dict[object, int] = {}
        n = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if n_descriptors is None else n_descriptors
        self.n_descriptors = n - min(n_spare, n * n_spare // _MANY_DESCRIPTORS)
        self._n_processes = n_processes
        self.adjust(self.limits)
        self._by_address: Counter[str | bytes] = Counter()
        self._log = BoundedLog(clock)

    def adjust(self, limits: Limits) -> None:
        """Go by these limits from now on; who is there already stays."""
        for field in fields(Limits):
            setattr(self.limits, field.name, getattr(limits, field.name))
        most = min(limits.max_connections, self._n_processes * self.n_descriptors)
        self._n_of_address = min(limits.max_connections_per_address, max(1, int(most * _PART_OF_ADDRESS)))
        self.rates.adjust(limits.max_requests_per_s, limits.max_request_burst)

    def admit(self, address: str | None, fd: int) -> bool:
        """Whether a connection from there is taken, whose descriptor has this number; None: a unix socket."""
        source = source_of(address)
        if fd >= self.n_descriptors:
            return self._refuse("descriptors", f"only {self.n_descriptors} descriptors are for connections")
        if self.n_open >= self.limits.max_connections:
            return self._refuse("connections", f"max_connections is {self.limits.max_connections}")
        if source and self._by_address[source] >= self._n_of_address:
            return self._refuse("address", f"{address} has {self._n_of_address}, the most of one address")
        self.admit_again(address)
        return True

    def admit_again(self, address: str | None) -> None:
        """Count a connection that was admitted by a front before."""
        self.n_open += 1
        self._by_address[source_of(address)] += 1

    def leave(self, address: str | None) -> None:
        """A connection that was taken has ended."""
        source = source_of(address)
        self.n_open -= 1
        self._by_address[source] -= 1
        if not self._by_address[source]:
            del self._by_address[source]

    def count_late(self, reason: str, client: tuple[str, int] | None) -> None:
        """Count a connection, or a request, that is ended because its client took too long."""
        self.late[reason] += 1
        if reason != "idle":
            self._log(f"a client took too long ({reason}): {client[0] if client else 'on a unix socket'}")

    def count_refused(self, reason: str, text: str) -> None:
        """Count a connection, or a stream of gRPC, that is refused for this."""
        self.refused[reason] += 1
        self._log(text)

    def _refuse(self, reason: str, text: str) -> bool:
        self.count_refused(reason, f"a connection is refused: {text}")
        return False


class OpenStreams:
    """The streams of gRPC that are open. Each holds memory while nothing comes of it, for as long as its
    client likes; one with a long head counts as several.
    """

    def __init__(self, admission: Admission) -> None:
        self.n_open = 0
        self._admission = admission
        self._by_address: Counter[str | bytes] = Counter()

    @contextlib.contextmanager
    def counted(self, exchange: Exchange) -> Iterator[None]:
        """Count a stream while the block lasts. Raises ResourceExhausted: there are too many."""
        client, most = exchange.ends.client, self._admission.limits.max_streams
        source = source_of(client and client[0])
        n = 1 + sum([len(name) + len(value) for name, value in exchange.head.headers]) // _HEAD_NBYTES
        n_of_all, n_of_address = self.n_open + n, self._by_address[source] + n
        if n_of_all > most or (source and n_of_address > max(1, int(most * _PART_OF_ADDRESS))):
            text = (
                f"{self.n_open} streams of gRPC are open, expected at most {most}, three quarters of them "
                "from one address (max_streams)"
            )
            self._admission.count_refused("streams", f"a stream is refused: {text}")
            raise ResourceExhausted(text)
        self.n_open, self._by_address[source] = n_of_all, n_of_address
        try:
            yield
        finally:
            self.n_open -= n
            self._by_address[source] -= n
            if not self._by_address[source]:
                del self._by_address[source]


def source_of(address: str | None) -> str | bytes:
    """Whose connections are counted together: an address, or the network of IPv6 that a machine may have."""
    if address is None or ":" not in address or address.startswith("::ffff:"):
        return address or ""
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8]


def raise_descriptor_limit() -> None:
    """Have as many descriptors as this process may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
