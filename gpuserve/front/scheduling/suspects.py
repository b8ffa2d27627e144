"""Suspect clients: clients whose requests killed workers. Their next requests run isolated, and back off in
place of the instance. Pure; times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

#: The number of worker deaths under its requests that makes a client a suspect.
DEATHS: Final = 2
#: The back-off of a suspect's requests after a death, which doubles with each death, like the restart
#: back-off of a worker.
FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0
#: A client is forgiven after this time without a worker death under its requests: twice the longest back-off.
FORGIVEN_AFTER_S: Final = 60.0
#: The most clients that are remembered. Beyond that, the client whose last death is the oldest is forgotten.
MOST_CLIENTS: Final = 1024


class Blame(NamedTuple):
    """The client whose request was the only one on an instance that died. ``is_new``: the client becomes a
    suspect with this death. ``was_isolated``: the client was a suspect before, so the request had been
    isolated.
    """

    client: Hashable
    is_new: bool
    was_isolated: bool


class Suspects:
    """The number of workers that died under the requests of each client, and the time of the last death."""

    def __init__(self) -> None:
        #: Ordered by the time of the last death, oldest first. Empty on a server whose workers do not die.
        self.deaths: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def __contains__(self, client: Hashable) -> bool:
        return self.deaths.get(client, (0, 0.0))[0] >= DEATHS

    def due_at(self, client: Hashable) -> float:
        """Return when the next request of a client may run, in seconds; minus infinity for at once."""
        count, died_at = self.deaths.get(client, (0, 0.0))
        if count < DEATHS:
            return -math.inf
        return died_at + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(count - DEATHS, 10))

    def forgive(self, now: float) -> None:
        """Forget the clients whose last death is at least ``FORGIVEN_AFTER_S`` ago."""
        while self.deaths:
            client, (_, died_at) = next(iter(self.deaths.items()))
            if now - died_at < FORGIVEN_AFTER_S:
                return
            del self.deaths[client]

    def blame(self, client: Hashable, now: float, attempts: int = 1) -> Blame:
        """Count a worker death under the only request that ran on an instance, a request of ``client``.

        ``attempts`` is the number of workers that died under this request. The first may have died while it
        ran other requests as well, a death for which nobody was blamed.
        """
        self.forgive(now)
        was_isolated = client in self
        count, _ = self.deaths.pop(client, (0, now))
        self.deaths[client] = (max(count + 1, attempts), now)
        if len(self.deaths) > MOST_CLIENTS:
            self.deaths.popitem(last=False)
        return Blame(client, not was_isolated and client in self, was_isolated)
