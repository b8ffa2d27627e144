"""From the start of the command to ready, and what the processes hold then."""

from __future__ import annotations

import resource
import subprocess
import sys
from statistics import median
from typing import ClassVar, Final, NamedTuple

from benchmarks import processes
from benchmarks.figures import Figure, Goal
from benchmarks.footprint import Start, start_of
from benchmarks.scenarios.scenario import RowPayload, Site, SleepingModel, pss_nbytes
from benchmarks.servers.server import RunningServer

_MANY: Final = 16
_READY_GOALS: Final = {1: Goal(0.8), _MANY: Goal(3.0)}
_OURS_GOAL: Final = Goal(110.0)
_WORKER_GOAL: Final = Goal(45.0)
_MODELS: Final = 200
_MODELS_READY_GOAL: Final = Goal(12.0)
_MODELS_CPU_GOAL: Final = Goal(0.08)
_MODELS_MEMORY_GOAL: Final = Goal(3000.0)
#: A bare interpreter that imports numpy, so often: what a worker cannot be below.
_BARE_RUNS: Final = 5


class ManyStart(NamedTuple):
    """One start of many models: s to ready, CPU seconds, bytes; ``bare_s`` is ``import numpy`` alone."""

    ready_s: float
    cpu_s: float
    worker_cpu_s: float
    bare_s: float
    pss_nbytes: int


class Starting:
    """An echo model with numpy and nothing else, with 1 and with 16 instances, and 200 models of one; each
    start is alone.
    """

    name: ClassVar[str] = "starting"
    title: ClassVar[str] = "start to ready, and memory of an idle server"
    goal: ClassVar[str] = (
        "0.8 s with 1 instance and 3 s with 16; RSS 110 MB for supervisor and front, 45 MB for a worker; "
        "200 models: 12 s, 0.08 s of CPU a worker, PSS 3 GB"
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
        return [*times, *(figure for pair in memory for figure in pair), *_of_many(_many_starts(site))]


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


def _many_starts(site: Site) -> list[ManyStart]:
    models = [SleepingModel("echo" if not number else f"echo-{number}", 0.0) for number in range(_MODELS)]
    starts = []
    for _ in range(site.effort.rounds):
        bare_s = _bare_s()
        with site.serving(models, f"starting-{_MODELS}-models") as one:
            starts.append(_many_start(one, bare_s))
            site.say(f"{_MODELS} models: ready after {one.ready_s:.2f} s")
    return starts


def _many_start(one: RunningServer, bare_s: float) -> ManyStart:
    all_of_it = processes.tree(one.pid)
    workers = [each.cpu_s for each in all_of_it if one.server.role(each.command) == "worker"]
    cpu_s = sum(each.cpu_s for each in all_of_it)
    return ManyStart(one.ready_s, cpu_s, sum(workers) / len(workers), bare_s, pss_nbytes(one))


def _bare_s() -> float:
    """CPU seconds of a process that imports numpy: the median of several."""
    taken = []
    for _ in range(_BARE_RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "import numpy"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(taken)


def _of_many(starts: list[ManyStart]) -> list[Figure]:
    case, numpy_of = f"{_MODELS} models", {"`import numpy`, CPU s": tuple(one.bare_s for one in starts)}
    ready, cpu = tuple(one.ready_s for one in starts), tuple(one.cpu_s for one in starts)
    workers = tuple(one.worker_cpu_s for one in starts)
    pss = tuple(one.pss_nbytes / 1e6 for one in starts)
    return [
        Figure(f"{case}, start to ready", "s", ready, _MODELS_READY_GOAL, {"CPU s": cpu}),
        Figure(f"{case}, a worker's start", "CPU s", workers, _MODELS_CPU_GOAL, numpy_of),
        Figure(f"{case}, all processes", "MB of PSS", pss, _MODELS_MEMORY_GOAL),
    ]


def _instances(count: int) -> str:
    return f"{count} instance{'s' * (count > 1)}"
