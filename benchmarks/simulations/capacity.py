"""``python -m benchmarks.simulations.capacity``: at which rate one front, one node and a fleet of nodes
saturate, from measured CPU times a request. Markdown on stdout.

A front is one process and one core, and a node has one front; with doors, it is a scheduler and its doors,
each with a core. What comes out is arithmetic on times that were
measured on two cores, and a simulation of the front with them; no such fleet was run. Not in it: the network,
the load balancer, the clients, other CPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.scenarios.arrivals import poisson
from benchmarks.scenarios.ideal import capacity_hz
from benchmarks.simulations.autoscaling.service import Service
from benchmarks.simulations.autoscaling.service import measured as services
from benchmarks.simulations.fronts import Simulation
from benchmarks.simulations.outcome import outcome
from benchmarks.simulations.setting import Costs, Deployment, Model, Sharing

RESULTS: Final = Path(__file__).resolve().parents[1] / "results"
_FILE: Final = "2-cores-native.json"
_PACED_FILE: Final = "2-cores-tail.json"
_DOORS_FILE: Final = "2-cores-doors.json"
_PACED_CASE: Final = "4 instances, 95% of capacity"
#: Rows of the benchmarks with many requests in flight: what a request costs a front that is busy.
_ROWS: Final = ("grpc-64-1x128", "grpc-64-8x16", "http-64-64", "bytes-64x32", "grpc-1m-8")
_DOORS_ROWS: Final = ("doors-64", "doors-1m", "doors-json")
DOORS: Final = (1, 2, 4, 8)
GOAL_HZ: Final = 1_000_000
NODES: Final = (1, 2, 4, 8, 16, 32, 64)
#: Of a node: instances, a core each.
WORKERS: Final = 8
#: Connections of all clients, for each node.
_CONNECTIONS: Final = 64
_DRAWS: Final = 101
_SEED: Final = 20
#: The tail of a front is at its limit where the p99 is so many times that at half of what it can do.
_TIMES: Final = 2.0
#: A model that is never the limit here.
_FAST: Final = Model(0.001, 64)


class Cost(NamedTuple):
    """CPU seconds a request, medians of the rounds, and how many requests a second were seen. ``worker_s`` 0:
    in the front's.
    """

    row: str
    title: str
    front_s: float
    worker_s: float
    seen_hz: float


@dataclass(frozen=True, slots=True)
class Node:
    """One front before workers with a core each. Rates are requests a second."""

    cost: Cost
    workers: int = WORKERS

    @property
    def front_hz(self) -> float:
        """The rate that uses the front's core fully."""
        return 1 / self.cost.front_s

    @property
    def workers_hz(self) -> float:
        """All workers' cores fully used, with a callable that costs nothing."""
        return self.workers / self.cost.worker_s if self.cost.worker_s else math.inf

    def most_hz(self, models_hz: float = math.inf) -> float:
        """What is reached first: the front, the workers, or what the models can do."""
        return min(self.front_hz, self.workers_hz, models_hz)


class DoorsCost(NamedTuple):
    """CPU seconds a request of a front that has the connections itself, and of the scheduler, a door and a
    worker where doors have them.
    """

    row: str
    title: str
    alone_s: float
    scheduler_s: float
    door_s: float
    worker_s: float

    def limits_hz(self, doors: int, workers: int = WORKERS) -> dict[str, float]:
        """The rate that each kind of process can do, with a core each."""
        workers_hz = workers / self.worker_s
        if doors == 1:
            return {"front": 1 / self.alone_s, "workers": workers_hz}
        return {"scheduler": 1 / self.scheduler_s, "doors": doors / self.door_s, "workers": workers_hz}


def measured_doors(results: Path = RESULTS) -> list[DoorsCost]:
    """The costs with doors, by row. Raises as ``measured``."""
    plain: Any = json.loads((results / _DOORS_FILE).read_text())
    return [_doors_cost(row, plain["doors"][row]) for row in _DOORS_ROWS]


def _doors_cost(row: str, plain: Mapping[str, Any]) -> DoorsCost:
    alone, apart = (plain["servers"][name]["cpu_s_by_role"] for name in ("doors-1", "doors-2"))
    front_s = median(one["scheduler"] for one in alone)
    roles = (median(one[role] for one in apart) for role in ("scheduler", "door", "worker"))
    return DoorsCost(row, plain["title"], front_s, *roles)


def measured(results: Path = RESULTS) -> list[Cost]:
    """The costs, by row.

    Raises:
        OSError, KeyError: the results are not there, or without these rows.
    """
    plain: Any = json.loads((results / _FILE).read_text())
    return [*(_cost(row, plain["rows"][row]) for row in _ROWS), _paced(results)]


def _paced(results: Path) -> Cost:
    """Each request in a packet of its own, as of many clients with one request each. What is known is the CPU
    time of front and workers together, so the front's is at most that.
    """
    plain: Any = json.loads((results / _PACED_FILE).read_text())
    cases = plain["scenarios"]["tail"]["servers"]["gpuserve"]
    (seen,) = (one["details"] for one in cases if one["case"] == _PACED_CASE)
    offered_hz = 0.95 * capacity_hz(4, 0.005, 32)
    answered_hz = offered_hz * (1 - seen["refused"][0])
    return Cost(
        "tail, 4 instances, 95%", _PACED_CASE, seen["server CPU µs a request"][0] * 1e-6, 0.0, answered_hz
    )


def _cost(row: str, plain: Mapping[str, Any]) -> Cost:
    seen = plain["servers"]["gpuserve"]
    front, worker = (median(one[role] for one in seen["cpu_s_by_role"]) for role in ("front", "worker"))
    return Cost(row, plain["title"], front, worker, median(seen["answers_per_s"]))


def fleet_hz(node_hz: float, shares: Sequence[float]) -> float:
    """The rate of all clients at which the first node is full, where node ``i`` gets ``shares[i]`` of it."""
    return node_hz / max(shares)


def nodes_for(rate_hz: float, node_hz: float, load: float) -> int:
    """How many nodes there must be so that none is above a load, where all get the same."""
    return math.ceil(rate_hz / (node_hz * load) - 1e-9)


def hashed_shares(nodes: int, connections: int, seed: int) -> tuple[float, ...]:
    """The parts of the requests that nodes get whose equal connections were spread at random; of many draws
    the one in the middle, by its fullest node.
    """
    source = random.Random(seed)
    draws = [Counter(source.choices(range(nodes), k=connections)) for _ in range(_DRAWS)]
    middle = sorted(draws, key=lambda one: max(one.values()))[_DRAWS // 2]
    return tuple(middle[node] / connections for node in range(nodes))


def tail_limit(cost: Cost, requests: int = 12_000) -> float:
    """The load of a front, in steps of 5 % of its core, up to which its p99 stays within ``_TIMES`` of that
    at half of what it can do. Simulated, with workers that are no limit.
    """
    alone = Deployment(_FAST, Costs(cost.front_s, batch_s=0.0), 1, WORKERS, Sharing.DIVIDED)

    def p99_s(load: float) -> float:
        rate_hz = load / cost.front_s
        schedule = poisson(rate_hz, requests / rate_hz, 64, _SEED)
        return outcome(Simulation(alone, schedule, (0,) * 64).run()).p99_s

    limit_s, low, high = _TIMES * p99_s(0.5), 10, 20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if p99_s(middle / 20) > limit_s else (middle, high)
    return low / 20


def node_lines(costs: Iterable[Cost], feeds: Service) -> Iterator[str]:
    """The lines for one front and for one node."""
    heads = (
        "load", "front CPU", "worker CPU", "seen, 2 cores with the client", "one front", "p99 holds up to",
        f"{WORKERS} workers that do nothing", "one node", f"pods of `{feeds.name}` that it feeds",
    )  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield f"| --- {'| ---: ' * (len(heads) - 1)}|"
    for cost in costs:
        node = Node(cost)
        cells = (
            f"`{cost.row}`",
            f"{cost.front_s * 1e6:.1f} µs",
            f"{cost.worker_s * 1e6:.1f} µs" if cost.worker_s else "in the front's",
            f"{cost.seen_hz:,.0f}/s",
            f"{node.front_hz:,.0f}/s",
            f"{tail_limit(cost):.0%}",
            f"{node.workers_hz:,.0f}/s" if cost.worker_s else "-",
            f"{node.most_hz():,.0f}/s",
            f"{node.most_hz() / feeds.capacity_hz:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


def doors_lines(costs: Iterable[DoorsCost]) -> Iterator[str]:
    """The lines for a front with so many doors, and what limits it."""
    counts = (f"{doors} door{'s' * (doors > 1)}" for doors in DOORS)
    heads = ("load", "front alone", "scheduler", "door", *counts)
    yield f"| {' | '.join(heads)} |"
    yield f"| --- {'| ---: ' * (len(heads) - 1)}|"
    for cost in costs:
        cells = [f"`{cost.row}`"]
        cells += [f"{one * 1e6:,.1f} µs" for one in (cost.alone_s, cost.scheduler_s, cost.door_s)]
        for doors in DOORS:
            limits = cost.limits_hz(doors)
            which = min(limits, key=lambda one: limits[one])
            cells.append(f"{limits[which]:,.0f}/s ({which})")
        yield f"| {' | '.join(cells)} |"


def fleet_lines(costs: Iterable[Cost], load: float) -> Iterator[str]:
    """Fleets with all nodes full, spread evenly and by a hash of connections; and the nodes for the goal."""
    heads = ("load", "1 node", *(f"{nodes} nodes" for nodes in NODES[1:]), f"nodes for {GOAL_HZ:,}/s")
    yield f"| {' | '.join(heads)} |"
    yield f"| --- {'| ---: ' * (len(NODES) + 1)}|"
    spread = [hashed_shares(nodes, _CONNECTIONS * nodes, _SEED) for nodes in NODES]
    for cost in costs:
        most_hz = Node(cost).most_hz()
        cells = [
            f"{fleet_hz(most_hz, (1 / nodes,)) / 1e3:,.0f} ({fleet_hz(most_hz, shares) / 1e3:,.0f})"
            for nodes, shares in zip(NODES, spread, strict=True)
        ]
        yield f"| `{cost.row}` | {' | '.join(cells)} | {nodes_for(GOAL_HZ, most_hz, load)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulations.capacity")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the measured times")
    parser.add_argument("--load", type=float, default=0.7, help="of each node; default: %(default)s")
    given = parser.parse_args(arguments)
    costs = measured(given.results)
    feeds = services(given.results)[0]
    doors = doors_lines(measured_doors(given.results))
    for lines in (node_lines(costs, feeds), doors, fleet_lines(costs, given.load)):
        for line in lines:
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
