"""Goodput under overload: what part of its capacity a server uses for answers that come in time."""

from __future__ import annotations

import math
from typing import ClassVar, Final

from benchmarks.scenarios.arrivals import poisson
from benchmarks.scenarios.figures import Figure, Goal, percentile
from benchmarks.scenarios.ideal import capacity_hz
from benchmarks.scenarios.open_loop import paced
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import Executions, Site, Usage
from benchmarks.scenarios.sleeping_cases import Case, Seen, name_of, seen_in_rounds
from benchmarks.servers import RunningServer

_BATCH_S: Final = 0.02
_MAX_ROWS: Final = 8
_TIMEOUT_S: Final = 5 * _BATCH_S
_INSTANCES: Final = (1, 2, 4)
#: By load, as a multiple of the capacity.
_GOALS: Final = {
    1.2: Goal(0.95, at_least=True),
    2.0: Goal(0.95, at_least=True),
    5.0: Goal(0.9, at_least=True),
}
_CONNECTIONS: Final = 8
_WARM_UP_S: Final = 1.0


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
        cases = [(count, load) for count in _INSTANCES for load in _GOALS]
        rounds = seen_in_rounds(site, cases, _BATCH_S, _MAX_ROWS, _measure, _told)
        return [_figure(case, seen) for case, seen in rounds.items()]


def _measure(
    site: Site, one: RunningServer, answer: bytes, instances: int, load: float, seed: int
) -> dict[str, float]:
    most_hz = capacity_hz(instances, _BATCH_S, _MAX_ROWS)
    seconds = site.effort.seconds
    schedule = poisson(load * most_hz, _WARM_UP_S + seconds, _CONNECTIONS, seed)
    usage, executions = Usage.read(one), Executions.read(one, name_of(instances))
    timeout = f"grpc-timeout:{round(_TIMEOUT_S * 1e6)}u"
    run = paced(one, RowPayload(name_of(instances)), answer, schedule, headers=[timeout])
    done, used = Executions.read(one, name_of(instances)).since(executions), Usage.read(one)
    first = next(index for index, at in enumerate(schedule.at_s) if at >= _WARM_UP_S)
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


def _told(case: Case, seen: Seen) -> str:
    return f"{_case(*case)}: {seen['goodput']:.3f} of the capacity in time"


def _figure(case: tuple[int, float], rounds: list[dict[str, float]]) -> Figure:
    columns = {name: tuple(seen[name] for seen in rounds) for name in rounds[0]}
    goodput = columns.pop("goodput")
    return Figure(_case(*case), "of the capacity, in time", goodput, _GOALS[case[1]], columns)


def _case(instances: int, load: float) -> str:
    return f"{instances} instance{'s' * (instances > 1)}, {load:g} times the capacity"
