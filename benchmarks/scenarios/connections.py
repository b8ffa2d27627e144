"""1,000 connections with a request a second each: the tail beside that of 10 such connections, and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from benchmarks.scenarios.arrivals import periodic
from benchmarks.scenarios.deployment import SleepingModel
from benchmarks.scenarios.figures import Figure, Goal, percentile
from benchmarks.scenarios.open_loop import paced
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import FIRST_SEED, Site, Usage, rss_nbytes
from benchmarks.servers import RunningServer

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
                    run = _measure(one, crowd, site.effort.seconds, answer, FIRST_SEED + turn)
                    runs.append(run)
                    site.say(f"{crowd.connections} x {crowd.rate_hz:g}/s: p99 {run.p99_s * 1e3:.3f} ms")
        memory = tuple(run.more_rss_nbytes / 1e6 for run in seen[_MANY])
        return [
            _figure("beside 10 with a request a second", seen[_MANY], seen[_FEW], _LATENCY_GOAL),
            _figure("beside 10 with 100 requests a second", seen[_MANY], seen[_FEW_BUSY], None),
            Figure("memory of 1,000 connections", "MB of RSS", memory, _MEMORY_GOAL),
        ]


def _measure(one: RunningServer, crowd: Crowd, seconds: float, answer: bytes, seed: int) -> _Seen:
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


def _figure(case: str, many: list[_Seen], few: list[_Seen], goal: Goal | None) -> Figure:
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
