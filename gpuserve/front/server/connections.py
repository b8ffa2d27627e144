"""The connections of one loop: made, looked at now and then, told to end, and closed. Where they come from is
not known here.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol

from gpuserve.front.exchange.connection import Connection
from gpuserve.front.exchange.exchange import Accept
from gpuserve.front.exchange.limits import Admission, source_of
from gpuserve.front.exchange.turn import Turn
from gpuserve.front.server.http1.protocol import Http1
from gpuserve.front.server.http2.protocol import Http2

#: How often connections are looked at that take too long.
_CHECK_S: Final = 1.0
#: And with the shortest of ages.
_MIN_CHECK_S: Final = 0.1
#: So long connections are looked at in one go; one with 4096 half requests takes 10 ms.
_CHECKING_S: Final = 0.005
#: Of a connection's greatest age.
_AGE_JITTER: Final = 0.1
#: Who reads nothing for so long is closed where ``max_unsent_nbytes`` are held.
_STUCK_S: Final = 2.0
#: After our own drain every request is answered, and what idles is closed at once. What is waited for are
#: answers to clients that are slow to read them.
CLOSE_TIMEOUT_S: Final = 3.0
_CLOSE_POLL_S: Final = 0.01


class Arrivals(Protocol):
    """Those who are not connections yet, such as handshakes."""

    @property
    def is_busy(self) -> bool:
        """Whether some of them will be connections without anything more from us."""

    def check(self, now: float) -> None:
        """Let go who has not become one in time."""


class Connections:
    """Those that are open, looked at from ``open`` to ``close``. ``idle_paths`` are how paths begin whose
    requests may be open while there is nothing to do. ``arrivals`` are looked at and waited for, too.
    """

    def __init__(
        self, admission: Admission, max_age_s: float = 0.0, idle_paths: tuple[str, ...] = ()
    ) -> None:
        self.members: set[Connection] = set()
        self.arrivals: list[Arrivals] = []
        self._admission = admission
        self._idle_paths = idle_paths
        self._loop = asyncio.get_running_loop()
        self._turn = Turn(self._loop.call_soon, self._loop.call_later)
        self._check: asyncio.Handle | None = None
        self.limit_age(max_age_s)

    def open(self) -> None:
        self._check = self._loop.call_later(self._check_s, self._on_check)

    async def close(self) -> None:
        """Close each once it is answered, and in a few seconds those that are left."""
        if self._check is not None:
            self._check.cancel()
        deadline = self._loop.time() + CLOSE_TIMEOUT_S
        while (self.members or any(one.is_busy for one in self.arrivals)) and self._loop.time() < deadline:
            for connection in list(self.members):
                connection.shut_down()
            await asyncio.sleep(_CLOSE_POLL_S)
            self.check_all()
        for connection in list(self.members):
            connection.abort()

    def maker(self, accept: Accept) -> Callable[..., Connection]:
        """What makes the connections whose requests are accepted so. A connection that is told how it gives
        its place back has one; others ask for it.
        """
        speaks = partial(Http1, accept=accept), partial(Http2, accept=accept)

        def made(leave: Callable[[], None] | None = None) -> Connection:
            # Connections that were made together do not end together.
            age_s = self._max_age_s * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)  # nosec B311
            return Connection(*speaks, self._turn, self.members, self._loop, age_s, self._admission, leave)

        return made

    def announce(self) -> None:
        for connection in list(self.members):
            connection.announce()

    @property
    def n_unaware(self) -> int:
        return sum(not connection.aware for connection in self.members)

    @property
    def n_held(self) -> int:
        """Who watches health has none, nor who operates the server, and may be waiting for this."""
        held = (path for connection in self.members for path in connection.held)
        return sum(not path.startswith(self._idle_paths) for path in held)

    def limit_age(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s or math.inf
        self._check_s = min(_CHECK_S, max(_MIN_CHECK_S, self._max_age_s * _AGE_JITTER / 4))
        if self._check is not None:
            self._check.cancel()
            self._on_check()

    def check_all(self) -> None:
        now = self._loop.time()
        for connection in list(self.members):
            connection.check(now)
        self._check_rest(now)

    def _on_check(self) -> None:
        self._check_some(iter(list(self.members)))

    def _check_some(self, left: Iterator[Connection]) -> None:
        """Check connections for a few milliseconds, the others in the next turn; then all, in a while."""
        began = self._loop.time()
        for connection in left:
            if connection in self.members:
                connection.check(began)
            if self._loop.time() - began > _CHECKING_S:
                self._check = self._loop.call_soon(self._check_some, left)
                return
        self._check_rest(began)
        self._check = self._loop.call_later(self._check_s, self._on_check)

    def _check_rest(self, now: float) -> None:
        for one in self.arrivals:
            one.check(now)
        self._shed()
        self._shed_half()

    def _shed(self) -> None:
        """Where too much waits to be read, close who reads nothing, with the most first."""
        unsent_nbytes = sum(one.backlog_nbytes for one in self.members)
        most_nbytes = self._admission.limits.max_unsent_nbytes
        if unsent_nbytes > most_nbytes:
            holding = [one for one in self.members if one.backlog_nbytes]
            for one in sorted(holding, key=lambda one: one.backlog_nbytes, reverse=True):
                if unsent_nbytes > most_nbytes and one.stuck_s >= _STUCK_S:
                    unsent_nbytes -= one.backlog_nbytes
                    one.count_late("answer")
                    one.abort()
        self._admission.unsent_nbytes[self] = unsent_nbytes

    def _shed_half(self) -> None:
        """Where too many requests have not come whole, close who has them, of the address with the most."""
        most, n = self._admission.limits.max_half_requests, sum([one.n_half for one in self.members])
        if n <= most:
            return
        holding = [(_address(one), one) for one in self.members if one.n_half]
        of_address = Counter[str | bytes]()
        for address, one in holding:
            of_address[address] += one.n_half
        for _, one in sorted(holding, key=lambda pair: (of_address[pair[0]], pair[1].n_half), reverse=True):
            if n > most:
                n -= one.n_half
                one.count_late("body")
                one.abort()


def _address(connection: Connection) -> str | bytes:
    client = connection.ends.client
    return source_of(client and client[0])
