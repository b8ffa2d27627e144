"""A fleet under an autoscaler for the length of a trace, and what came of it. Pure and seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from benchmarks.simulations.autoscaling.controller import SYNC_PERIOD_S, Autoscaler, Scaling
from benchmarks.simulations.autoscaling.fleet import Fleet, Tally
from benchmarks.simulations.autoscaling.service import Service, Steady
from gpuserve.declare.spec import QueueSpec


@dataclass(frozen=True, slots=True)
class Setting:
    """What an autoscaler is told, and how the metric comes to it.

    Of each pod the scrapes of the last ``average_s`` are averaged, and at most ``limit`` is told.
    """

    scaling: Scaling
    limit: float = math.inf
    average_s: int = 15


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The cluster. A scrape is known to the autoscaler ``delay_s`` later. A pod takes ``start_s`` until it is
    ready, and stays ``drain_s`` after it was told to go.
    """

    scrape_s: int = 15
    delay_s: int = 5
    start_s: float = 60.0
    drain_s: float = 15.0
    queue_rows: int = QueueSpec().max_requests


#: The cluster that the settings are chosen in.
USUAL: Final = Surroundings()


class Outcome(NamedTuple):
    """``p50_s`` and ``p99_s`` are of the times that accepted requests waited; ``events`` counts changes of
    the number of pods. ``history`` has the pods there were and the readings' mean, at each sync.
    """

    requests: float
    refused: float
    p50_s: float
    p99_s: float
    pod_s: float
    events: int
    most_pods: int
    history: tuple[tuple[int, int, float], ...]

    @property
    def refused_part(self) -> float:
        """The part of all requests that was refused."""
        return self.refused / self.requests if self.requests else 0.0


def run(
    service: Service,
    states: Sequence[Steady],
    arrivals: Sequence[int],
    setting: Setting,
    seed: int,
    where: Surroundings = USUAL,
) -> Outcome:
    """Every second of a trace. The fleet begins with the pods that the first seconds need."""
    scaling = setting.scaling
    needed = math.ceil(max(arrivals[:60]) / service.capacity_hz / min(1.0, scaling.target))
    fleet = Fleet(
        service,
        states,
        random.Random(seed),
        pods=min(max(needed, scaling.least), scaling.most),
        start_s=where.start_s,
        drain_s=where.drain_s,
        queue_rows=where.queue_rows,
    )
    autoscaler, remember = Autoscaler(scaling), max(1, setting.average_s // where.scrape_s)
    events, history = 0, []
    known: list[float] = []
    for second, requests in enumerate(arrivals):
        fleet.serve(second, requests)
        if second % where.scrape_s == 0:
            fleet.scrape(second, remember)
        if second % where.scrape_s == where.delay_s % where.scrape_s:
            known = fleet.readings(setting.limit)
        if second % SYNC_PERIOD_S == SYNC_PERIOD_S - 1:
            before = fleet.pods
            chosen = autoscaler.decide(second, before, known[:before])
            fleet.scale(second, chosen)
            events += chosen != before
            history.append((second, before, sum(known) / len(known) if known else 0.0))
    return _outcome(fleet.tally, states, events, history)


def _outcome(
    tally: Tally, states: Sequence[Steady], events: int, history: list[tuple[int, int, float]]
) -> Outcome:
    waits = list(tally.overload)
    for load, requests in tally.steady.items():
        points = states[load].waits_s
        waits += [(wait_s, requests / len(points)) for wait_s in points]
    p50_s, p99_s = quantiles(waits, (0.5, 0.99))
    most = max((pods for _, pods, _ in history), default=0)
    return Outcome(tally.requests, tally.refused, p50_s, p99_s, tally.pod_s, events, most, tuple(history))


def quantiles(weighted: Iterable[tuple[float, float]], parts: Sequence[float]) -> list[float]:
    """For each part, in order, the smallest value that at least that part of the weight does not exceed; 0
    where there is no weight.
    """
    ordered = sorted(one for one in weighted if one[1] > 0)
    total, running, found = math.fsum(weight for _, weight in ordered), 0.0, []
    values = iter(ordered)
    value = 0.0
    for part in parts:
        while running < part * total * (1 - 1e-12):
            value, weight = next(values)
            running += weight
        found.append(value)
    return found
