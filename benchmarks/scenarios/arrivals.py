"""When requests come, before anything is sent: times in seconds from the start, in order. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests of one run: request ``i`` is due at ``at_s[i]``, on connection ``connection[i]``."""

    at_s: tuple[float, ...]
    connection: tuple[int, ...]

    @property
    def connections(self) -> int:
        """The number of connections."""
        return max(self.connection) + 1


def poisson(rate_hz: float, seconds: float, connections: int, seed: int) -> Schedule:
    """Independent clients: intervals are exponential. Connections take turns."""
    source = random.Random(seed)
    times: list[float] = []
    now = source.expovariate(rate_hz)
    while now < seconds:
        times.append(now)
        now += source.expovariate(rate_hz)
    return Schedule(tuple(times), tuple(index % connections for index in range(len(times))))


def periodic(rate_hz: float, seconds: float, connections: int, seed: int) -> Schedule:
    """Every connection sends ``rate_hz`` requests a second, evenly, and began at a moment of its own."""
    source = random.Random(seed)
    period_s = 1 / rate_hz
    phases = [source.random() * period_s for _ in range(connections)]
    due = sorted(
        (phase + turn * period_s, connection)
        for connection, phase in enumerate(phases)
        for turn in range(round(seconds * rate_hz))
    )
    return Schedule(tuple(at for at, _ in due), tuple(connection for _, connection in due))
