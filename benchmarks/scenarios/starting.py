"""From the start of the command to ready, and what the processes hold then."""

from __future__ import annotations

from statistics import median
from typing import ClassVar, Final

from benchmarks.footprint import Start, start_of
from benchmarks.scenarios.deployment import SleepingModel
from benchmarks.scenarios.figures import Figure, Goal
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import Site

_MANY: Final = 16
_READY_GOALS: Final = {1: Goal(0.8), _MANY: Goal(3.0)}
_OURS_GOAL: Final = Goal(110.0)
_WORKER_GOAL: Final = Goal(45.0)


class Starting:
    """An echo model with numpy and nothing else, with 1 and with 16 instances; each start is alone."""

    name: ClassVar[str] = "starting"
    title: ClassVar[str] = "start to ready, and memory of an idle server"
    goal: ClassVar[str] = (
        "0.8 s with 1 instance and 3 s with 16; RSS 110 MB for supervisor and front, 45 MB for a worker"
    )
    program: ClassVar[str | None] = None
    servers: ClassVar[dict[str, str | None]] = {
        "gpuserve": None,
        "triton": "the row `starts` of the other benchmarks has it",
    }

    def run(self, site: Site) -> list[Figure]:
        """Measure the times and the memory of starts."""
        starts: dict[int, list[Start]] = {1: [], _MANY: []}
        for _ in range(site.effort.rounds):
            for count, runs in starts.items():
                with site.serving([SleepingModel("echo", 0.0, count)], f"starting-{count}") as one:
                    RowPayload("echo").check(one)
                    runs.append(start_of(one))
                    site.say(f"{count} instances: ready after {one.ready_s:.2f} s")
        times = [_time(count, runs) for count, runs in starts.items()]
        memory = [_memory(count, runs) for count, runs in starts.items()]
        return [*times, *(figure for pair in memory for figure in pair)]


def _time(count: int, runs: list[Start]) -> Figure:
    samples = tuple(run.ready_s for run in runs)
    return Figure(f"{_instances(count)}, start to ready", "s", samples, _READY_GOALS[count])


def _memory(count: int, runs: list[Start]) -> tuple[Figure, Figure]:
    workers = [[one.memory for one in run.processes if one.role == "worker"] for run in runs]
    others = [[one.memory for one in run.processes if one.role != "worker"] for run in runs]
    return (
        Figure(
            f"{_instances(count)}, supervisor and front",
            "MB of RSS",
            tuple(sum(one.rss_nbytes for one in run) / 1e6 for run in others),
            _OURS_GOAL,
            {"PSS MB": tuple(sum(one.pss_nbytes for one in run) / 1e6 for run in others)},
        ),
        Figure(
            f"{_instances(count)}, the largest worker",
            "MB of RSS",
            tuple(max(one.rss_nbytes for one in run) / 1e6 for run in workers),
            _WORKER_GOAL,
            {"PSS MB": tuple(median(one.pss_nbytes for one in run) / 1e6 for run in workers)},
        ),
    )


def _instances(count: int) -> str:
    return f"{count} instance{'s' * (count > 1)}"
