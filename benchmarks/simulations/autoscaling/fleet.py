"""Pods that start, serve and go, a second at a time. Pure.

Requests are spread evenly over the pods that are ready. A pod is a fluid queue: what it cannot answer within
a second waits, up to ``queue_rows``, and the rest is refused and does not come again. Where nothing is left
over, waits are those of the steady state at its load (``service.py``). Pods of one age are alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.simulations.autoscaling.service import LOADS, Service, Steady

_STEP: Final = LOADS[1] - LOADS[0]
_TOP: Final = len(LOADS) - 1


@dataclass(slots=True)
class Cohort:
    """``pods`` that began at the same time. ``backlog`` are the rows left over in each; ``said`` is what each
    said at its scrapes, the latest last.
    """

    pods: int
    ready_at: float
    load: int = 0
    backlog: float = 0.0
    said: list[list[float]] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """What became of the requests, and what it cost. ``steady`` counts requests by the load of their pod,
    ``overload`` has (seconds waited, requests) where a queue was left over.
    """

    requests: float = 0.0
    refused: float = 0.0
    pod_s: float = 0.0
    steady: dict[int, float] = field(default_factory=dict)
    overload: list[tuple[float, float]] = field(default_factory=list)


class Fleet:
    """Pods of one service. ``start_s``: from its creation a pod takes so long to be ready; ``drain_s``: so
    long it stays after it was told to go.
    """

    def __init__(
        self,
        service: Service,
        states: Sequence[Steady],
        source: random.Random,
        *,
        pods: int,
        start_s: float,
        drain_s: float,
        queue_rows: int,
    ) -> None:
        self._service = service
        self._states = states
        self._source = source
        self._start_s, self._drain_s, self._queue_rows = start_s, drain_s, queue_rows
        self._cohorts = [Cohort(pods, 0.0)]
        self.tally = Tally()

    @property
    def pods(self) -> int:
        """How many there are, those that start included."""
        return sum(one.pods for one in self._cohorts)

    def ready(self, now: float) -> list[Cohort]:
        """The cohorts of pods that serve."""
        return [one for one in self._cohorts if one.ready_at <= now]

    def serve(self, now: float, requests: int) -> None:
        """Serve the requests of one second."""
        tally, ready = self.tally, self.ready(now)
        tally.requests += requests
        tally.pod_s += self.pods
        serving = sum(one.pods for one in ready)
        if not serving:
            tally.refused += requests
            return
        for one in ready:
            self._take(one, requests / serving)

    def _take(self, cohort: Cohort, rows: float) -> None:
        capacity, tally = self._service.capacity_hz, self.tally
        before = cohort.backlog
        left = max(0.0, before + rows - capacity)
        refused = max(0.0, left - self._queue_rows)
        cohort.backlog = left - refused
        cohort.load = min(_TOP, max(0, round((rows / capacity - LOADS[0]) / _STEP)))
        tally.refused += refused * cohort.pods
        accepted = (rows - refused) * cohort.pods
        if before or left:
            tally.overload.append(((before + cohort.backlog) / 2 / capacity, accepted))
        else:
            tally.steady[cohort.load] = tally.steady.get(cohort.load, 0.0) + accepted

    def scrape(self, now: float, remember: int) -> None:
        """Each pod that is ready says its saturation; so many of the latest are kept."""
        for one in self.ready(now):
            if one.backlog:
                sample = 1 + one.backlog / self._service.slot_rows
                said = [sample] * one.pods
            else:
                said = self._source.choices(self._states[one.load].saturations, k=one.pods)
            one.said = [*one.said, said][-remember:]

    def readings(self, limit: float) -> list[float]:
        """For each pod that said something, the mean of what is kept, at most ``limit``."""
        return [
            min(limit, math.fsum(values) / len(values))
            for one in self._cohorts
            for values in zip(*one.said, strict=True)
        ]

    def scale(self, now: float, pods: int) -> None:
        """Let pods begin, or the youngest go."""
        more = pods - self.pods
        if more > 0:
            self._cohorts.append(Cohort(more, now + self._start_s))
        while more < 0:
            youngest = self._cohorts[-1]
            gone = min(-more, youngest.pods)
            if youngest.ready_at <= now:
                self.tally.pod_s += gone * (self._drain_s + youngest.backlog / self._service.capacity_hz)
            self._shrink(youngest, gone)
            more += gone

    def _shrink(self, cohort: Cohort, gone: int) -> None:
        cohort.pods -= gone
        cohort.said = [said[: cohort.pods] for said in cohort.said]
        if not cohort.pods:
            self._cohorts.remove(cohort)
