"""What one pod can do, and what it says of itself at a load. Pure but for reading measured times."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.scenarios.arrivals import poisson
from benchmarks.scenarios.ideal import capacity_hz, ideal_latencies

#: Of the fleet's loads, the part of what a pod can do at most for which its queue has a steady state here.
LOADS: Final = tuple(percent / 100 for percent in range(2, 98, 2))
#: So many points stand for a distribution, each for the same part of it.
_POINTS: Final = 200
#: Scenario ``tail``: a batch of up to 32 rows every 5,400 µs, of which the model takes 5,045. From the table
#: of the cycle in docs/performance.md, "What the scenarios found".
_TAIL_CYCLE_S: Final = 5_400e-6
_TAIL_ROWS: Final = 32


@dataclass(frozen=True, slots=True)
class Service:
    """A pod: ``instances`` that take ``batch_s`` from one batch to the next, of up to ``max_rows`` rows."""

    name: str
    batch_s: float
    max_rows: int
    instances: int
    source: str

    @property
    def capacity_hz(self) -> float:
        """The most rows per second."""
        return capacity_hz(self.instances, self.batch_s, self.max_rows)

    @property
    def slot_rows(self) -> int:
        """Rows that keep every instance fully busy: a saturation of 1."""
        return self.instances * self.max_rows


def measured(results: Path) -> tuple[Service, ...]:
    """The pods that are simulated, with times that were measured.

    Raises:
        OSError, KeyError: the results are not there, or without what is wanted of them.
    """
    file = "2-cores-scenarios.json"
    plain: Any = json.loads((results / file).read_text())
    cases = plain["scenarios"]["scaling"]["servers"]["gpuserve"]
    rate_hz = {case["case"]: case["details"]["req/s"][0] for case in cases}["8 instances"]
    return (
        Service(
            "1 instance, 32 rows", _TAIL_CYCLE_S, _TAIL_ROWS, 1, "docs/performance.md, the cycle of `tail`"
        ),
        Service("8 instances, 1 row", 8 / rate_hz, 1, 8, f"{file}, `scaling`, 8 instances"),
    )


@dataclass(frozen=True, slots=True)
class Steady:
    """A pod at a steady load: times that requests waited (s), and saturations at random moments. Each value
    stands for the same part of its distribution, in order.
    """

    waits_s: tuple[float, ...]
    saturations: tuple[float, ...]

    @property
    def saturation(self) -> float:
        """The mean saturation."""
        return sum(self.saturations) / len(self.saturations)


def steady(service: Service, load: float, seed: int, requests: int = 12_000) -> Steady:
    """Simulate a pod at a part of what it can do, with requests of one row that come at random."""
    rate_hz = load * service.capacity_hz
    arrivals = poisson(rate_hz, requests / rate_hz, 1, seed).at_s
    latencies = ideal_latencies(arrivals, service.instances, service.batch_s, service.max_rows)
    waits = sorted(max(0.0, one - service.batch_s) for one in latencies)
    ends = sorted(at + latency for at, latency in zip(arrivals, latencies, strict=True))
    source = random.Random(seed)
    moments = [source.uniform(arrivals[0], arrivals[-1]) for _ in range(10 * _POINTS)]
    inside = sorted(bisect_right(arrivals, at) - bisect_right(ends, at) for at in moments)
    return Steady(_points(waits), _points([one / service.slot_rows for one in inside]))


def steady_states(service: Service, seed: int, requests: int = 12_000) -> tuple[Steady, ...]:
    """A steady state for each of ``LOADS``."""
    return tuple(steady(service, load, seed, requests) for load in LOADS)


def load_at(states: Sequence[Steady], saturation: float) -> float:
    """The load at which a pod says, on average, that it is so saturated."""
    known = [(0.0, 0.0), *((one.saturation, load) for one, load in zip(states, LOADS, strict=True))]
    for (low, from_load), (high, to_load) in pairwise(known):
        if low <= saturation < high:
            return from_load + (to_load - from_load) * (saturation - low) / (high - low)
    return LOADS[-1]


def _points(ordered: Sequence[float]) -> tuple[float, ...]:
    return tuple(ordered[int((point + 0.5) / _POINTS * len(ordered))] for point in range(_POINTS))
