"""Request rate limits: a token bucket for each client, and log lines that clients cannot flood."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import nlargest
from operator import itemgetter
from typing import Final, TypeAlias

from gpuserve.core.errors import RateLimited

logger = logging.getLogger(__name__)

#: Minimum interval between two log lines, in seconds.
LOG_INTERVAL_S: Final = 10.0


class BoundedLog:
    """A log of warnings that clients can cause: one in ``LOG_INTERVAL_S``, with a count of the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at = -LOG_INTERVAL_S
        self._n_suppressed = 0

    def __call__(self, text: str) -> None:
        now = self._clock()
        if now - self._logged_at < LOG_INTERVAL_S:
            self._n_suppressed += 1
            return
        more = f" ({self._n_suppressed} similar warnings suppressed before)" if self._n_suppressed else ""
        self._logged_at, self._n_suppressed = now, 0
        logger.warning("%s%s", text, more)


#: The key of a client: the index of its access token, or its address (of IPv6 the /64 network).
Client: TypeAlias = int | str | bytes
#: The maximum number of buckets. Above the maximum the least recently seen client loses its bucket.
MAX_CLIENTS: Final = 65_536
#: The maximum number of clients in one report of spent tokens, those with the most tokens first.
_MAX_REPORTED: Final = 1024


class TokenBuckets:
    """One token bucket for each client, each with ``rate`` tokens a second and ``burst`` tokens at most.

    A bucket is stored as the time at which it is full again (the generic cell rate algorithm), so a full
    bucket needs no entry, and taking a token is one look-up however many clients there are.
    """

    def __init__(self, rate: float, burst: int, max_clients: int = MAX_CLIENTS) -> None:
        self._interval_s = 1.0 / rate
        self._tolerance_s = (burst - 1) / rate
        self._max_clients = max_clients
        #: The time at which each bucket is full again, least recently seen client first.
        self._full_at: OrderedDict[Client, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, client: Client, now: float) -> float:
        """Remove a token of a client. Return 0.0, or if there is none, the seconds until there is."""
        full_at = max(self._full_at.get(client, now), now)
        wait_s = full_at - now - self._tolerance_s
        if wait_s > 1e-9:  # the rounding error of added intervals
            self._full_at.move_to_end(client)
            return wait_s
        self._store(client, full_at + self._interval_s, now)
        return 0.0

    def charge(self, client: Client, n: int, now: float) -> None:
        """Remove ``n`` tokens that another process granted. The bucket may go below zero."""
        self._store(client, max(self._full_at.get(client, now), now) + n * self._interval_s, now)

    def _store(self, client: Client, full_at: float, now: float) -> None:
        buckets = self._full_at
        buckets[client] = full_at
        buckets.move_to_end(client)
        # Each request drops up to two entries and adds one, so full buckets do not accumulate.
        for _ in range(2):
            oldest = next(iter(buckets))
            if buckets[oldest] > now and len(buckets) <= self._max_clients:
                return
            del buckets[oldest]


class RequestRates:
    """The rate limiter of one process. ``is_on`` is read before any method is called.

    If ``reports``, the tokens it granted are recorded, so that other processes can charge their buckets.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, reports: bool = False) -> None:
        self.is_on = False
        #: Refused requests by the kind of client key.
        self.refused = {"address": 0, "token": 0}
        self._rate = 0
        self._burst = 0
        self._buckets = TokenBuckets(1, 1)
        self._spent: dict[Client, int] = {}
        self._reports = reports
        self._clock = clock
        self._log = BoundedLog(clock)

    def adjust(self, rate: int | None, burst: int | None) -> None:
        """Apply ``max_requests_per_s`` and ``max_request_burst``. A change fills every bucket."""
        burst = burst or rate or 0
        if (rate or 0, burst) != (self._rate, self._burst):
            self._rate, self._burst, self.is_on = rate or 0, burst, rate is not None
            self._buckets = TokenBuckets(rate or 1, burst or 1)
            self._spent.clear()

    def refusal(self, client: Client) -> RateLimited | None:
        """Remove one token of a client. Return the error for the request if the bucket is empty."""
        wait_s = self._buckets.take(client, self._clock())
        if not wait_s:
            if self._reports:
                self._spent[client] = self._spent.get(client, 0) + 1
            return None
        kind = "token" if isinstance(client, int) else "address"
        self.refused[kind] += 1
        self._log(f"refused a request of {_shown(client)}: over max_requests_per_s, which is {self._rate}")
        return RateLimited(
            f"too many requests from this {kind}: expected at most {self._rate} a second and {self._burst} "
            f"at once (max_requests_per_s, max_request_burst); retry in {max(wait_s, 0.001):.3f} s",
            wait_s,
        )

    def take_spent(self) -> tuple[tuple[Client, int], ...]:
        """Return the tokens granted since the last call, by client."""
        spent, self._spent = self._spent, {}
        return tuple(nlargest(_MAX_REPORTED, spent.items(), key=itemgetter(1)))

    def charge(self, spent: Iterable[tuple[Client, int]]) -> None:
        """Charge the buckets with tokens that another process granted."""
        if self.is_on:
            now = self._clock()
            for client, n in spent:
                self._buckets.charge(client, n, now)


def retry_after_s(error: RateLimited) -> int:
    """Return the whole seconds for the ``Retry-After`` header."""
    return max(1, math.ceil(error.retry_after_s))


def _shown(client: Client) -> str:
    if isinstance(client, bytes):
        groups = [client[at : at + 2].hex() for at in range(0, len(client), 2)]
        return f"{':'.join(groups)}::/64"
    return f"access token {client}" if isinstance(client, int) else client
