"""Scenarios in an open loop: requests come at their times, whatever became of those before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final, NamedTuple

from benchmarks.figures import Figure, Goal, percentile
from benchmarks.rounds import Clocks
from benchmarks.scenarios.ideal import capacity_hz, ideal_latencies
from benchmarks.scenarios.loads import Schedule, paced, periodic, poisson
from benchmarks.scenarios.paced_client import Paced
from benchmarks.scenarios.scenario import (
    FIRST_SEED,
    Executions,
    Scenario,
    Seen,
    Site,
    SleepingModel,
    figure,
    row,
    rss_nbytes,
)
from benchmarks.servers.server import RunningServer

_INSTANCES: Final = (1, 2, 4)
_CONNECTIONS: Final = 8
#: Requests of the first second are sent, and not looked at: connections, arenas and caches are filled.
_WARM_UP_S: Final = 1.0


class _Poisson(Scenario):
    """Poisson arrivals of single rows at 1, 2 and 4 instances of a model that sleeps. ``goals`` by the
    load, as a multiple of the capacity.
    """

    batch_s: float
    max_rows: int
    unit: str
    goals: ClassVar[Mapping[float, Goal]]
    headers: tuple[str, ...] = ()

    def case(self, instances: int, load: float) -> str:
        return f"{instances} instance{'s' * (instances > 1)}, {load:g} times the capacity"

    def told(self, seen: Seen) -> str:
        raise NotImplementedError

    def seen(self, site: Site, schedule: Schedule, run: Paced, instances: int, batch_s: float) -> Seen:
        """Return the figures of one run, the sample first; its batches took ``batch_s`` on average."""
        raise NotImplementedError

    def run(self, site: Site) -> list[Figure]:
        """Nine cases, instances by load, one round after the other on one server with all models."""
        names = {count: f"sleep-{count}" for count in _INSTANCES}
        models = [SleepingModel(name, self.batch_s, count, self.max_rows) for count, name in names.items()]
        rounds: dict[tuple[int, float], list[Seen]] = {(n, load): [] for n in names for load in self.goals}
        with site.serving(models) as one:
            answers = {count: row(name).check(one) for count, name in names.items()}
            for turn in range(site.effort.rounds):
                for (count, load), found in rounds.items():
                    found.append(self._measured(site, one, answers[count], count, load, FIRST_SEED + turn))
                    site.say(f"round {turn + 1}  {self.case(count, load)}: {self.told(found[-1])}")
        return [
            figure(self.case(count, load), self.unit, found, self.goals[load])
            for (count, load), found in rounds.items()
        ]

    def _measured(
        self, site: Site, one: RunningServer, answer: bytes, instances: int, load: float, seed: int
    ) -> Seen:
        rate_hz = load * capacity_hz(instances, self.batch_s, self.max_rows)
        schedule = poisson(rate_hz, _WARM_UP_S + site.effort.seconds, _CONNECTIONS, seed)
        model = f"sleep-{instances}"
        clocks, executions = Clocks.read(one.pid), Executions.read(one, model)
        run = paced(one, row(model), answer, schedule, headers=self.headers)
        done, now = Executions.read(one, model).since(executions), Clocks.read(one.pid)
        server_s, batch_s = now.server_cpu_s - clocks.server_cpu_s, done.compute_s / done.batches
        return {
            **self.seen(site, schedule, run, instances, batch_s),
            "rows a batch": done.rows / done.batches,
            "ms a batch": batch_s * 1e3,
            "client late p99 ms": percentile(run.late_s[schedule.first_after(_WARM_UP_S) :], 99) * 1e3,
            "client CPU share": run.cpu_s / run.took_s,
            "server CPU µs a request": server_s / len(schedule.at_s) * 1e6,
            "others' share": now.others_share(clocks),
        }


class Tail(_Poisson):
    """Arrivals at a part of what the ideal server could do at most."""

    name = "tail"
    title = "a model that takes 5 ms a batch of up to 32 rows, open loop"
    goal = "p99 at most 1.15 times that of the ideal single-queue batch server"
    batch_s = 0.005
    max_rows = 32
    unit = "times the ideal p99"
    goals = dict.fromkeys((0.5, 0.8, 0.95), Goal(1.15))

    def case(self, instances: int, load: float) -> str:
        return f"{instances} instance{'s' * (instances > 1)}, {load:.0%} of capacity"

    def told(self, seen: Seen) -> str:
        return f"p99 {seen['p99 ms']:.2f} ms, {seen['ratio']:.3f} of the ideal"

    def seen(self, site: Site, schedule: Schedule, run: Paced, instances: int, batch_s: float) -> Seen:
        first = schedule.first_after(_WARM_UP_S)
        ideal = ideal_latencies(schedule.at_s, instances, self.batch_s, self.max_rows)[first:]
        slower = ideal_latencies(schedule.at_s, instances, batch_s, self.max_rows)[first:]
        p99_s, ideal_p99_s = percentile(run.latency_s[first:], 99), percentile(ideal, 99)
        return {
            "ratio": p99_s / ideal_p99_s,
            "p99 ms": p99_s * 1e3,
            "ideal p99 ms": ideal_p99_s * 1e3,
            "p50 ms": percentile(run.latency_s[first:], 50) * 1e3,
            "ideal p50 ms": percentile(ideal, 50) * 1e3,
            "times the ideal of its batches": p99_s / percentile(slower, 99),
            "refused": sum(map(math.isinf, run.latency_s)) / len(run.latency_s),
        }


#: Of the models with deadlines, and of those with fairness.
_SLOW_S, _SLOW_ROWS = 0.02, 8
_TIMEOUT_S: Final = 5 * _SLOW_S


class Deadlines(_Poisson):
    """Arrivals beyond the capacity; each has a deadline of five batch times."""

    name = "deadlines"
    title = (
        "a model that takes 20 ms a batch of up to 8 rows, open loop, each request with a deadline of 100 ms"
    )
    goal = "answers in time at least 0.95, 0.95 and 0.9 of the capacity at 1.2, 2 and 5 times it"
    batch_s = _SLOW_S
    max_rows = _SLOW_ROWS
    unit = "of the capacity, in time"
    goals: ClassVar = {
        load: Goal(least, at_least=True) for load, least in ((1.2, 0.95), (2.0, 0.95), (5.0, 0.9))
    }
    headers = (f"grpc-timeout:{round(_TIMEOUT_S * 1e6)}u",)

    def told(self, seen: Seen) -> str:
        return f"{seen['goodput']:.3f} of the capacity in time"

    def seen(self, site: Site, schedule: Schedule, run: Paced, instances: int, batch_s: float) -> Seen:
        most_hz = capacity_hz(instances, self.batch_s, self.max_rows)
        latency_s = run.latency_s[schedule.first_after(_WARM_UP_S) :]
        answered = [one for one in latency_s if math.isfinite(one)]
        in_time = sum(one <= _TIMEOUT_S for one in answered)
        return {
            "goodput": in_time / site.effort.seconds / most_hz,
            "refused": 1 - len(answered) / len(latency_s),
            "late": 1 - in_time / max(1, len(answered)),
            "p50 ms": percentile(answered or [math.inf], 50) * 1e3,
            "p99 ms": percentile(answered or [math.inf], 99) * 1e3,
        }


_HEADER: Final = "x-client"
#: By client, what it sends as a multiple of its share, which is half of the capacity.
_LOADS: Final = {"quiet": 1.0, "loud": 5.0}
#: An answer that comes within so many seconds is one to a client that waits.
_PATIENCE_S: Final = 1.0


class Fairness(Scenario):
    """Poisson arrivals from a client that keeps to its share, and from one that does not."""

    name = "fairness"
    title = (
        "two clients of a model that takes 20 ms a batch of up to 8 rows, open loop: one sends half of the "
        "capacity, the other five times as much"
    )
    goal = "of the quiet client's requests at least 0.9 are answered within a second"
    servers: ClassVar = {"gpuserve": None, "triton": "it knows no fairness"}

    def run(self, site: Site) -> list[Figure]:
        """With fairness and, for comparison, without."""
        models = [
            SleepingModel("fair", _SLOW_S, 1, _SLOW_ROWS, _HEADER),
            SleepingModel("unfair", _SLOW_S, 1, _SLOW_ROWS),
        ]
        rounds: dict[str, list[Seen]] = {one.name: [] for one in models}
        with site.serving(models) as one:
            for turn in range(site.effort.rounds):
                for name, found in rounds.items():
                    found.append(_two_clients(site, one, name, FIRST_SEED + 2 * turn))
                    site.say(f"round {turn + 1}  {name}: {found[-1]['quiet']:.3f} of the quiet client's")
        unit = "of the quiet client's requests"
        return [
            figure("fairness: client", unit, rounds["fair"], Goal(0.9, at_least=True)),
            figure("none", unit, rounds["unfair"]),
        ]


def _two_clients(site: Site, one: RunningServer, model: str, seed: int) -> Seen:
    payload, seconds = row(model), site.effort.seconds
    answer = payload.check(one)
    share_hz = capacity_hz(1, _SLOW_S, _SLOW_ROWS) / len(_LOADS)
    with ThreadPoolExecutor(len(_LOADS)) as clients:
        under_way = []
        for number, (client, load) in enumerate(_LOADS.items()):
            schedule = poisson(load * share_hz, _WARM_UP_S + seconds, 4, seed + number)
            run = clients.submit(paced, one, payload, answer, schedule, headers=[f"{_HEADER}:{client}"])
            under_way.append((client, schedule, run))
        found: Seen = {}
        for client, schedule, run in under_way:
            latency_s = run.result().latency_s[schedule.first_after(_WARM_UP_S) :]
            found[client] = sum(one <= _PATIENCE_S for one in latency_s) / len(latency_s)
            found[f"{client}, share"] = sum(map(math.isfinite, latency_s)) / seconds / share_hz
            found[f"{client}, p50 ms"] = percentile(latency_s, 50) * 1e3
    return found


_ECHO: Final = row("echo")


class _Crowd(NamedTuple):
    connections: int
    rate_hz: float


_MANY: Final = _Crowd(1000, 1.0)
_FEW: Final = _Crowd(10, 1.0)
#: As many requests as the 1,000, on 10: what the connections themselves cost.
_FEW_BUSY: Final = _Crowd(10, 100.0)


class Connections(Scenario):
    """Open loop; every connection has its own moment of the second. The first second is not counted."""

    name = "connections"
    title = "1,000 connections, a request a second each"
    goal = "p99 at most 3 times that of 10 connections with a request a second each; RSS at most 60 MB more"

    def run(self, site: Site) -> list[Figure]:
        """Two goals, and the same number of requests on 10 connections for comparison."""
        seen: dict[_Crowd, list[Seen]] = {_FEW: [], _FEW_BUSY: [], _MANY: []}
        with site.serving([SleepingModel("echo", 0.0)]) as one:
            answer = _ECHO.check(one)
            # What the first requests ever leave behind is no connection's doing.
            paced(one, _ECHO, answer, periodic(200.0, 2.0, 10, FIRST_SEED))
            for turn in range(site.effort.rounds):
                for crowd, runs in seen.items():
                    runs.append(_crowded(one, crowd, site.effort.seconds, answer, FIRST_SEED + turn))
                    site.say(f"{crowd.connections} x {crowd.rate_hz:g}/s: p99 {runs[-1]['p99 ms']:.3f} ms")
        memory = [{"MB": run["MB"]} for run in seen[_MANY]]
        return [
            _beside("beside 10 with a request a second", seen[_MANY], seen[_FEW], Goal(3.0)),
            _beside("beside 10 with 100 requests a second", seen[_MANY], seen[_FEW_BUSY], None),
            figure("memory of 1,000 connections", "MB of RSS", memory, Goal(60.0)),
        ]


def _crowded(one: RunningServer, crowd: _Crowd, seconds: float, answer: bytes, seed: int) -> Seen:
    schedule = periodic(crowd.rate_hz, _WARM_UP_S + seconds, crowd.connections, seed)
    before, clocks, highest = rss_nbytes(one), Clocks.read(one.pid), [0]
    run = paced(one, _ECHO, answer, schedule, lambda: highest.append(rss_nbytes(one)))
    first = schedule.first_after(_WARM_UP_S)
    return {
        "p50 ms": percentile(run.latency_s[first:], 50) * 1e3,
        "p99 ms": percentile(run.latency_s[first:], 99) * 1e3,
        "client late p99 ms": percentile(run.late_s[first:], 99) * 1e3,
        "MB": (max(highest) - before) / 1e6,
        "others' share": Clocks.read(one.pid).others_share(clocks),
    }


def _beside(case: str, many: list[Seen], few: list[Seen], goal: Goal | None) -> Figure:
    rounds = [
        {
            "ratio": a["p99 ms"] / b["p99 ms"],
            "p99 ms": a["p99 ms"],
            "p99 ms of the 10": b["p99 ms"],
            "p50 ms": a["p50 ms"],
            "p50 ms of the 10": b["p50 ms"],
            "client late p99 ms": a["client late p99 ms"],
            "others' share": a["others' share"],
        }
        for a, b in zip(many, few, strict=True)
    ]
    return figure(case, "times the p99 of 10", rounds, goal)
