"""Scenarios in an open loop: requests come at their times, whatever became of those before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Final

from benchmarks.figures import Figure, Goal, percentile
from benchmarks.scenarios.ideal import capacity_hz, ideal_latencies
from benchmarks.scenarios.loads import paced, periodic, poisson
from benchmarks.scenarios.scenario import (
    FIRST_SEED,
    Executions,
    RowPayload,
    Site,
    SleepingModel,
    Usage,
    rss_nbytes,
)
from benchmarks.servers.server import RunningServer

#: Instances, and the load that they are given.
Case = tuple[int, float]
#: What was seen in one run, by the column that shows it.
Seen = dict[str, float]
#: Site, server, right answer, instances, load, seed.
Measure = Callable[[Site, RunningServer, bytes, int, float, int], Seen]


def name_of(instances: int) -> str:
    return f"sleep-{instances}"


def seen_in_rounds(
    site: Site,
    cases: Sequence[Case],
    batch_s: float,
    max_rows: int,
    measure: Measure,
    tell: Callable[[Case, Seen], str],
) -> dict[Case, list[Seen]]:
    """What was seen of each case, a round after the other, on one server with all models."""
    counts = sorted({instances for instances, _ in cases})
    models = [SleepingModel(name_of(count), batch_s, count, max_rows) for count in counts]
    rounds: dict[Case, list[Seen]] = {case: [] for case in cases}
    with site.serving(models) as one:
        answers = {count: RowPayload(name_of(count)).check(one) for count in counts}
        for turn in range(site.effort.rounds):
            for case in cases:
                seen = measure(site, one, answers[case[0]], *case, FIRST_SEED + turn)
                rounds[case].append(seen)
                site.say(f"round {turn + 1}  {tell(case, seen)}")
    return rounds


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


_DEADLINES_BATCH_S: Final = 0.02
_DEADLINES_MAX_ROWS: Final = 8
_TIMEOUT_S: Final = 5 * _DEADLINES_BATCH_S
_DEADLINES_INSTANCES: Final = (1, 2, 4)
#: By load, as a multiple of the capacity.
_GOALS: Final = {
    1.2: Goal(0.95, at_least=True),
    2.0: Goal(0.95, at_least=True),
    5.0: Goal(0.9, at_least=True),
}
_DEADLINES_CONNECTIONS: Final = 8
_DEADLINES_WARM_UP_S: Final = 1.0


class Deadlines:
    """Poisson arrivals of single rows beyond the capacity; each has a deadline of five batch times."""

    name: ClassVar[str] = "deadlines"
    title: ClassVar[str] = (
        "a model that takes 20 ms a batch of up to 8 rows, open loop, each request with a deadline of 100 ms"
    )
    goal: ClassVar[str] = (
        "answers in time at least 0.95, 0.95 and 0.9 of the capacity at 1.2, 2 and 5 times it"
    )
    program: ClassVar[str | None] = None
    servers: ClassVar[dict[str, str | None]] = {"gpuserve": None, "triton": None}

    def run(self, site: Site) -> list[Figure]:
        """Nine cases: instances by load."""
        cases = [(count, load) for count in _DEADLINES_INSTANCES for load in _GOALS]
        rounds = seen_in_rounds(
            site, cases, _DEADLINES_BATCH_S, _DEADLINES_MAX_ROWS, _deadlines_measure, _deadlines_told
        )
        return [_deadlines_figure(case, seen) for case, seen in rounds.items()]


def _deadlines_measure(
    site: Site, one: RunningServer, answer: bytes, instances: int, load: float, seed: int
) -> dict[str, float]:
    most_hz = capacity_hz(instances, _DEADLINES_BATCH_S, _DEADLINES_MAX_ROWS)
    seconds = site.effort.seconds
    schedule = poisson(load * most_hz, _DEADLINES_WARM_UP_S + seconds, _DEADLINES_CONNECTIONS, seed)
    usage, executions = Usage.read(one), Executions.read(one, name_of(instances))
    timeout = f"grpc-timeout:{round(_TIMEOUT_S * 1e6)}u"
    run = paced(one, RowPayload(name_of(instances)), answer, schedule, headers=[timeout])
    done, used = Executions.read(one, name_of(instances)).since(executions), Usage.read(one)
    first = next(index for index, at in enumerate(schedule.at_s) if at >= _DEADLINES_WARM_UP_S)
    latency_s = run.latency_s[first:]
    answered = [one for one in latency_s if math.isfinite(one)]
    in_time = sum(one <= _TIMEOUT_S for one in answered)
    return {
        "goodput": in_time / seconds / most_hz,
        "refused": 1 - len(answered) / len(latency_s),
        "late": 1 - in_time / max(1, len(answered)),
        "p50 ms": percentile(answered or [math.inf], 50) * 1e3,
        "p99 ms": percentile(answered or [math.inf], 99) * 1e3,
        "rows a batch": done.rows / done.batches,
        "ms a batch": done.compute_s / done.batches * 1e3,
        "client late p99 ms": percentile(run.late_s[first:], 99) * 1e3,
        "client CPU share": run.cpu_s / run.took_s,
        "server CPU µs a request": (used.server_s - usage.server_s) / len(schedule.at_s) * 1e6,
        "others' share": used.share_of_others(usage, run.cpu_s, run.took_s),
    }


def _deadlines_told(case: Case, seen: Seen) -> str:
    return f"{_deadlines_case(*case)}: {seen['goodput']:.3f} of the capacity in time"


def _deadlines_figure(case: tuple[int, float], rounds: list[dict[str, float]]) -> Figure:
    columns = {name: tuple(seen[name] for seen in rounds) for name in rounds[0]}
    goodput = columns.pop("goodput")
    return Figure(_deadlines_case(*case), "of the capacity, in time", goodput, _GOALS[case[1]], columns)


def _deadlines_case(instances: int, load: float) -> str:
    return f"{instances} instance{'s' * (instances > 1)}, {load:g} times the capacity"


_FAIRNESS_BATCH_S: Final = 0.02
_FAIRNESS_MAX_ROWS: Final = 8
_HEADER: Final = "x-client"
#: By client, what it sends as a multiple of its share, which is half of the capacity.
_LOADS: Final = {"quiet": 1.0, "loud": 5.0}
_FAIRNESS_CONNECTIONS: Final = 4
#: An answer that comes within so many seconds is one to a client that waits.
_PATIENCE_S: Final = 1.0
_FAIRNESS_WARM_UP_S: Final = 1.0
_FAIRNESS_GOAL: Final = Goal(0.9, at_least=True)


class Fairness:
    """Poisson arrivals from a client that keeps to its share, and from one that does not."""

    name: ClassVar[str] = "fairness"
    title: ClassVar[str] = (
        "two clients of a model that takes 20 ms a batch of up to 8 rows, open loop: one sends half of the "
        "capacity, the other five times as much"
    )
    goal: ClassVar[str] = "of the quiet client's requests at least 0.9 are answered within a second"
    program: ClassVar[str | None] = None
    servers: ClassVar[dict[str, str | None]] = {"gpuserve": None, "triton": "it knows no fairness"}

    def run(self, site: Site) -> list[Figure]:
        """With fairness and, for comparison, without."""
        models = [
            SleepingModel("fair", _FAIRNESS_BATCH_S, 1, _FAIRNESS_MAX_ROWS, _HEADER),
            SleepingModel("unfair", _FAIRNESS_BATCH_S, 1, _FAIRNESS_MAX_ROWS),
        ]
        rounds: dict[str, list[dict[str, float]]] = {one.name: [] for one in models}
        with site.serving(models) as one:
            for turn in range(site.effort.rounds):
                for name, found in rounds.items():
                    found.append(_fairness_measure(site, one, name, FIRST_SEED + 2 * turn))
                    site.say(f"round {turn + 1}  {name}: {found[-1]['quiet']:.3f} of the quiet client's")
        return [
            _fairness_figure("fairness: client", rounds["fair"], _FAIRNESS_GOAL),
            _fairness_figure("none", rounds["unfair"], None),
        ]


def _fairness_measure(site: Site, one: RunningServer, model: str, seed: int) -> dict[str, float]:
    payload, seconds = RowPayload(model), site.effort.seconds
    answer = payload.check(one)
    share_hz = capacity_hz(1, _FAIRNESS_BATCH_S, _FAIRNESS_MAX_ROWS) / len(_LOADS)
    with ThreadPoolExecutor(len(_LOADS)) as clients:
        running = []
        for number, (client, load) in enumerate(_LOADS.items()):
            schedule = poisson(
                load * share_hz, _FAIRNESS_WARM_UP_S + seconds, _FAIRNESS_CONNECTIONS, seed + number
            )
            headers = [f"{_HEADER}:{client}"]
            run = clients.submit(paced, one, payload, answer, schedule, headers=headers)
            running.append((client, schedule, run))
        found: dict[str, float] = {}
        for client, schedule, run in running:
            first = next(index for index, at in enumerate(schedule.at_s) if at >= _FAIRNESS_WARM_UP_S)
            latency_s = run.result().latency_s[first:]
            found[client] = sum(one <= _PATIENCE_S for one in latency_s) / len(latency_s)
            found[f"{client}, share"] = sum(map(math.isfinite, latency_s)) / seconds / share_hz
            found[f"{client}, p50 ms"] = percentile(latency_s, 50) * 1e3
    return found


def _fairness_figure(case: str, rounds: list[dict[str, float]], goal: Goal | None) -> Figure:
    columns = {name: tuple(seen[name] for seen in rounds) for name in rounds[0]}
    quiet = columns.pop("quiet")
    return Figure(case, "of the quiet client's requests", quiet, goal, columns)


_PAYLOAD: Final = RowPayload("echo")
_LATENCY_GOAL: Final = Goal(3.0)
_MEMORY_GOAL: Final = Goal(60.0)


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many connections that send so often."""

    connections: int
    rate_hz: float


_MANY: Final = Crowd(1000, 1.0)
_FEW: Final = Crowd(10, 1.0)
#: As many requests as the 1,000, on 10: what the connections themselves cost.
_FEW_BUSY: Final = Crowd(10, 100.0)


@dataclass(frozen=True, slots=True)
class _Seen:
    p50_s: float
    p99_s: float
    late_p99_s: float
    more_rss_nbytes: int
    others_share: float


class Connections:
    """Open loop; every connection has its own moment of the second. The first second is not counted."""

    name: ClassVar[str] = "connections"
    title: ClassVar[str] = "1,000 connections, a request a second each"
    goal: ClassVar[str] = (
        "p99 at most 3 times that of 10 connections with a request a second each; RSS at most 60 MB more"
    )
    program: ClassVar[str | None] = None
    servers: ClassVar[dict[str, str | None]] = {"gpuserve": None, "triton": None}

    def run(self, site: Site) -> list[Figure]:
        """Two goals, and the same number of requests on 10 connections for comparison."""
        seen: dict[Crowd, list[_Seen]] = {_FEW: [], _FEW_BUSY: [], _MANY: []}
        with site.serving([SleepingModel("echo", 0.0)]) as one:
            answer = _PAYLOAD.check(one)
            # What the first requests ever leave behind is no connection's doing.
            paced(one, _PAYLOAD, answer, periodic(200.0, 2.0, 10, FIRST_SEED))
            for turn in range(site.effort.rounds):
                for crowd, runs in seen.items():
                    run = _connections_measure(one, crowd, site.effort.seconds, answer, FIRST_SEED + turn)
                    runs.append(run)
                    site.say(f"{crowd.connections} x {crowd.rate_hz:g}/s: p99 {run.p99_s * 1e3:.3f} ms")
        memory = tuple(run.more_rss_nbytes / 1e6 for run in seen[_MANY])
        return [
            _connections_figure("beside 10 with a request a second", seen[_MANY], seen[_FEW], _LATENCY_GOAL),
            _connections_figure("beside 10 with 100 requests a second", seen[_MANY], seen[_FEW_BUSY], None),
            Figure("memory of 1,000 connections", "MB of RSS", memory, _MEMORY_GOAL),
        ]


def _connections_measure(one: RunningServer, crowd: Crowd, seconds: float, answer: bytes, seed: int) -> _Seen:
    schedule = periodic(crowd.rate_hz, 1.0 + seconds, crowd.connections, seed)
    before, usage, highest = rss_nbytes(one), Usage.read(one), [0]
    run = paced(one, _PAYLOAD, answer, schedule, lambda: highest.append(rss_nbytes(one)))
    counted = [index for index, at in enumerate(schedule.at_s) if at >= 1.0]
    latencies = [run.latency_s[index] for index in counted]
    return _Seen(
        percentile(latencies, 50),
        percentile(latencies, 99),
        percentile([run.late_s[index] for index in counted], 99),
        max(highest) - before,
        Usage.read(one).share_of_others(usage, run.cpu_s, run.took_s),
    )


def _connections_figure(case: str, many: list[_Seen], few: list[_Seen], goal: Goal | None) -> Figure:
    ratios = tuple(a.p99_s / b.p99_s for a, b in zip(many, few, strict=True))
    details = {
        "p99 ms": tuple(run.p99_s * 1e3 for run in many),
        "p99 ms of the 10": tuple(run.p99_s * 1e3 for run in few),
        "p50 ms": tuple(run.p50_s * 1e3 for run in many),
        "p50 ms of the 10": tuple(run.p50_s * 1e3 for run in few),
        "client late p99 ms": tuple(run.late_p99_s * 1e3 for run in many),
        "others' share": tuple(run.others_share for run in many),
    }
    return Figure(case, "times the p99 of 10", ratios, goal, details)
