"""An open-loop load: requests come when they are due, whatever became of the earlier ones.

Latency counts from when a request was due. What clients do is in ``grpc_client.py`` and ``http_client.py``,
which clients there are in ``clients.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Final, NamedTuple, Protocol

from benchmarks.rollout.outcomes import Kind, Outcome, Outcomes, Way

#: A request that fails for a reason that may pass is asked again, as users' clients do it.
MOST_ATTEMPTS: Final = 6
TIMEOUT_S: Final = 20.0
#: Before the second attempt; then twice as long each time.
_BACKOFF_S: Final = 0.1


class Transient(Exception):
    """Another attempt may succeed: UNAVAILABLE, 503, a connection that was lost."""


class Wrong(Exception):
    """An answer that is none: of other contents, or an error that does not pass."""


class Client(Protocol):
    """Asks one kind of request one way."""

    kind: Kind
    way: Way

    async def ask(self, number: int) -> int:
        """Ask, and check the contents of the answer, which depend on the number; returns how often a proxy
        sent it.

        Raises:
            Transient: it failed, and may succeed if it is asked again.
            Wrong: it will not.
        """

    async def close(self) -> None:
        """Close the connections."""


class Failure(NamedTuple):
    """An attempt after which another one was made. ``at_s`` is of ``time.monotonic``."""

    kind: Kind
    way: Way
    at_s: float
    why: str


class Load:
    """Runs from ``run()`` until ``stop()``, and then until everything is answered or lost."""

    def __init__(
        self, rate_per_s: float, clients: Sequence[Client], outcomes: Outcomes, random: Random
    ) -> None:
        #: What the clients did not leave at that.
        self.failures: list[Failure] = []
        #: Requests that a proxy sent more than once, which clients do not notice.
        self.n_sent_again: Counter[Kind] = Counter()
        self._rate_per_s = rate_per_s
        self._clients = clients
        self._outcomes = outcomes
        self._random = random
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Send no more requests."""
        self._stopped.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Under load in the block; at its end every request is over, and the clients are closed."""
        task = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            self.stop()
            await task
            for client in self._clients:
                await client.close()

    async def run(self) -> None:
        """Send requests until ``stop``."""
        due_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                if await self._is_stopped_before(due_s):
                    return
                client = self._clients[number % len(self._clients)]
                group.create_task(self._ask(client, number, due_s))
                due_s += self._random.expovariate(self._rate_per_s)

    async def _is_stopped_before(self, due_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                await self._stopped.wait()
        return self._stopped.is_set()

    async def _ask(self, client: Client, number: int, due_s: float) -> None:
        failures: list[Failure] = []
        lost = ""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                n_sent = await self._attempts(client, number, failures)
                self.n_sent_again[client.kind] += n_sent > 1
        except TimeoutError:
            lost = f"no answer within {TIMEOUT_S:g} s"
        except (Transient, Wrong) as error:
            lost = str(error)
        if lost and failures:
            lost += f", and before that {failures[0].why}"
        self.failures += failures
        self._outcomes.note(
            Outcome(client.kind, client.way, due_s, time.monotonic(), lost, retried=bool(failures))
        )

    async def _attempts(self, client: Client, number: int, failures: list[Failure]) -> int:
        while True:
            try:
                return await client.ask(number)
            except Transient as error:
                if len(failures) + 1 == MOST_ATTEMPTS:
                    raise
                failures.append(Failure(client.kind, client.way, time.monotonic(), str(error)))
            await asyncio.sleep(_BACKOFF_S * 2.0 ** (len(failures) - 1))
