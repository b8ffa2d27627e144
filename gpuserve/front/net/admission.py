"""Admission of connections: limits on what clients may use, and counts of refused and overdue clients.

A new descriptor has the lowest free number, so its number tells how many descriptors are in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import ResourceExhausted
from gpuserve.front.net.exchange import Exchange
from gpuserve.front.net.request_rate_limiter import BoundedLog, RequestRates

#: Descriptors reserved for other uses of the process; with fewer than ``_MANY_DESCRIPTORS`` in proportion.
SPARE_DESCRIPTORS: Final = 256
_MANY_DESCRIPTORS: Final = 1024
#: The maximum share of one address in all connections.
_ADDRESS_SHARE: Final = 0.75
#: A gRPC stream counts once more for each so many bytes of its head.
_HEAD_NBYTES: Final = 8 << 10


@dataclass(slots=True)
class Limits:
    """The limits of connections: settings of the same names. All connections share one object."""

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


def slow_body_text(limits: Limits) -> str:
    """Return the error text for a request whose body arrives too slowly."""
    return (
        f"the request body did not come in time: expected {limits.min_body_rate} bytes a second over any "
        f"{limits.body_grace_s:g} s, got less"
    )


class Admission:
    """The decision which connections are accepted, and counts of refused ones by reason. The connections are
    spread over ``n_processes`` with ``n_descriptors`` each.
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
        #: Connections and requests that were ended by a timeout, by what was overdue.
        self.late = dict.fromkeys(("idle", "head", "body", "answer", "handshake"), 0)
        #: Response bytes of all connections that wait for HTTP/2 windows.
        self.held_nbytes = 0
        #: Bytes of long HTTP/2 heads of open streams.
        self.heads_nbytes = 0
        #: Response bytes that clients have not read as of the last check, by group of connections.
        self.unsent_nbytes: dict[object, int] = {}
        n = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if n_descriptors is None else n_descriptors
        self.n_descriptors = n - min(n_spare, n * n_spare // _MANY_DESCRIPTORS)
        self._n_processes = n_processes
        self.adjust(self.limits)
        self._by_address: Counter[str | bytes] = Counter()
        self._log = BoundedLog(clock)

    def adjust(self, limits: Limits) -> None:
        """Apply new limits. Existing connections stay."""
        for field in fields(Limits):
            setattr(self.limits, field.name, getattr(limits, field.name))
        most = min(limits.max_connections, self._n_processes * self.n_descriptors)
        self._n_of_address = min(limits.max_connections_per_address, max(1, int(most * _ADDRESS_SHARE)))
        self.rates.adjust(limits.max_requests_per_s, limits.max_request_burst)

    def admit(self, address: str | None, fd: int) -> bool:
        """Return whether to accept a connection.

        Args:
            address: The client's address; None on a unix socket.
            fd: The number of the connection's descriptor.
        """
        source = source_of(address)
        if fd >= self.n_descriptors:
            return self._refuse("descriptors", f"only {self.n_descriptors} descriptors are for connections")
        if self.n_open >= self.limits.max_connections:
            return self._refuse("connections", f"max_connections is {self.limits.max_connections}")
        n_of_source = self._by_address.get(source, 0)
        if source and n_of_source >= self._n_of_address:
            return self._refuse("address", f"{address} has {self._n_of_address}, the most of one address")
        self.n_open += 1
        self._by_address[source] = n_of_source + 1
        return True

    def readmit(self, address: str | None) -> None:
        """Count a connection that a previous front process admitted."""
        self.n_open += 1
        self._by_address[source_of(address)] += 1

    def release(self, address: str | None) -> None:
        """Count the end of an admitted connection."""
        source = source_of(address)
        self.n_open -= 1
        self._by_address[source] -= 1
        if not self._by_address[source]:
            del self._by_address[source]

    def count_late(self, reason: str, client: tuple[str, int] | None) -> None:
        """Count a connection or a request that is ended by a timeout."""
        self.late[reason] += 1
        if reason != "idle":
            self._log(f"a client took too long ({reason}): {client[0] if client else 'on a unix socket'}")

    def count_refused(self, reason: str, text: str) -> None:
        """Count and log a refused connection or gRPC stream."""
        self.refused[reason] += 1
        self._log(text)

    def _refuse(self, reason: str, text: str) -> bool:
        self.count_refused(reason, f"refused a connection: {text}")
        return False


class OpenStreams:
    """The open gRPC streams, which hold memory while idle; one with a long head counts as several."""

    def __init__(self, admission: Admission) -> None:
        self.n_open = 0
        self._admission = admission
        self._by_address: Counter[str | bytes] = Counter()

    @contextlib.contextmanager
    def counted(self, exchange: Exchange) -> Iterator[None]:
        """Count a stream while the block runs. Raise ResourceExhausted if there are too many."""
        client, most = exchange.endpoints.client, self._admission.limits.max_streams
        source = source_of(client and client[0])
        n = 1 + sum([len(name) + len(value) for name, value in exchange.head.headers]) // _HEAD_NBYTES
        n_of_all, n_of_address = self.n_open + n, self._by_address[source] + n
        if n_of_all > most or (source and n_of_address > max(1, int(most * _ADDRESS_SHARE))):
            text = (
                f"{self.n_open} streams of gRPC are open, expected at most {most}, three quarters of them "
                "from one address (max_streams)"
            )
            self._admission.count_refused("streams", f"refused a gRPC stream: {text}")
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
    """Return the key under which a client's connections are counted: its address, or IPv6 /64 network."""
    if address is None or ":" not in address or address.startswith("::ffff:"):
        return address or ""
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8]


def raise_descriptor_limit() -> None:
    """Raise the soft limit on descriptors to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# ---- from the settings ---------------------------------------------------------------------------

#: Limits that each ingress process enforces on its own.
_DIVIDED_LIMITS: Final = ("max_unsent_nbytes", "max_half_requests", "max_streams", "max_intake_nbytes")


def limits_from_settings(settings: ServerSettings) -> Limits:
    """Return the limits of connections in the server settings."""
    return Limits(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)})


def ingress_share(settings: ServerSettings) -> ServerSettings:
    """Return the settings for one ingress process: limits divided, but for those of connections."""
    return dataclasses.replace(
        settings,
        **{name: -(-getattr(settings, name) // settings.ingress_processes) for name in _DIVIDED_LIMITS},
    )


# ---- timers ------------------------------------------------------------------------------


class ChangeTimer:
    """A timer for how long a value has been unchanged. Pure."""

    __slots__ = ("_seen", "_since")

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def unchanged_s(self, seen: object, now: float) -> float:
        """Return for how many seconds ``seen`` has had its present value."""
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


class MinimumRate:
    """A check that a transfer makes progress at a minimum rate, in consecutive grace periods. Pure."""

    __slots__ = ("_moved", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        self._moved = 0

    def is_slow(self, now: float, moved: int | None, grace_s: float, rate: float) -> bool:
        """Return whether ``moved`` (None: idle) grew too slowly, by ``rate`` a second, in a grace period."""
        since = self._since
        if moved is not None and since is not None and now - since < grace_s:
            return False
        slow = moved is not None and since is not None and moved - self._moved < rate * (now - since)
        self._since, self._moved = (None, 0) if moved is None else (now, moved)
        return slow
