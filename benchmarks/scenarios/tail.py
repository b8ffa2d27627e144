"""The tail under a steady load: p99 of a model that takes 5 ms a batch, beside the ideal batch server's."""

from __future__ import annotations

import math
from typing import ClassVar, Final

from benchmarks.scenarios.arrivals import poisson
from benchmarks.scenarios.figures import Figure, Goal, percentile
from benchmarks.scenarios.ideal import capacity_hz, ideal_latencies
from benchmarks.scenarios.open_loop import paced
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import Executions, Site, Usage
from benchmarks.scenarios.sleeping_cases import Case, Seen, name_of, seen_in_rounds
from benchmarks.servers import RunningServer

_BATCH_S: Final = 0.005
_MAX_ROWS: Final = 32
_INSTANCES: Final = (1, 2, 4)
_SHARES: Final = (0.5, 0.8, 0.95)
_CONNECTIONS: Final = 8
#: Requests of the first second are sent, and not looked at: connections, arenas and caches are filled.
_WARM_UP_S: Final = 1.0
_GOAL: Final = Goal(1.15)


class Tail:
    """Poisson arrivals of single rows at a part of what the ideal server could do at most."""

    name: ClassVar[str] = "tail"
    title: ClassVar[str] = "a model that takes 5 ms a batch of up to 32 rows, open loop"
    goal: ClassVar[str] = "p99 at most 1.15 times that of the ideal single-queue batch server"
    program: ClassVar[str | None] = None
    servers: ClassVar[dict[str, str | None]] = {"gpuserve": None, "triton": None}

    def run(self, site: Site) -> list[Figure]:
        """Nine cases: instances by load."""
        cases = [(count, load) for count in _INSTANCES for load in _SHARES]
        rounds = seen_in_rounds(site, cases, _BATCH_S, _MAX_ROWS, _measure, _told)
        return [_figure(case, seen) for case, seen in rounds.items()]


def _measure(
    site: Site, one: RunningServer, answer: bytes, instances: int, share: float, seed: int
) -> dict[str, float]:
    """One run and its simulation, on the same arrivals."""
    rate_hz = share * capacity_hz(instances, _BATCH_S, _MAX_ROWS)
    schedule = poisson(rate_hz, _WARM_UP_S + site.effort.seconds, _CONNECTIONS, seed)
    ideal = ideal_latencies(schedule.at_s, instances, _BATCH_S, _MAX_ROWS)
    usage, executions = Usage.read(one), Executions.read(one, name_of(instances))
    run = paced(one, RowPayload(name_of(instances)), answer, schedule)
    done, used = Executions.read(one, name_of(instances)).since(executions), Usage.read(one)
    first = next(index for index, at in enumerate(schedule.at_s) if at >= _WARM_UP_S)
    p99_s, ideal_p99_s = percentile(run.latency_s[first:], 99), percentile(ideal[first:], 99)
    batch_s = done.compute_s / done.batches
    slower = ideal_latencies(schedule.at_s, instances, batch_s, _MAX_ROWS)
    return {
        "ratio": p99_s / ideal_p99_s,
        "p99 ms": p99_s * 1e3,
        "ideal p99 ms": ideal_p99_s * 1e3,
        "p50 ms": percentile(run.latency_s[first:], 50) * 1e3,
        "ideal p50 ms": percentile(ideal[first:], 50) * 1e3,
        "rows a batch": done.rows / done.batches,
        "ms a batch": batch_s * 1e3,
        "times the ideal of that": p99_s / percentile(slower[first:], 99),
        "refused": sum(map(math.isinf, run.latency_s)) / len(run.latency_s),
        "client late p99 ms": percentile(run.late_s[first:], 99) * 1e3,
        "client CPU share": run.cpu_s / run.took_s,
        "server CPU µs a request": (used.server_s - usage.server_s) / len(schedule.at_s) * 1e6,
        "others' share": used.share_of_others(usage, run.cpu_s, run.took_s),
    }


def _told(case: Case, seen: Seen) -> str:
    return f"{_case(*case)}: p99 {seen['p99 ms']:.2f} ms, {seen['ratio']:.3f} of the ideal"


def _figure(case: tuple[int, float], rounds: list[dict[str, float]]) -> Figure:
    columns = {name: tuple(seen[name] for seen in rounds) for name in rounds[0]}
    ratios = columns.pop("ratio")
    return Figure(_case(*case), "times the ideal p99", ratios, _GOAL, columns)


def _case(instances: int, share: float) -> str:
    return f"{instances} instance{'s' * (instances > 1)}, {share:.0%} of capacity"
