"""From the start of the command to ready, and what the processes hold then."""

from __future__ import annotations

import resource
import subprocess
import sys
from statistics import median
from typing import ClassVar, Final

from benchmarks import processes
from benchmarks.figures import Figure, Goal
from benchmarks.footprint import Start, start_of
from benchmarks.scenarios.closed_loop import echoes
from benchmarks.scenarios.scenario import Scenario, Seen, Site, SleepingModel, figure, pss_nbytes, row

_MANY: Final = 16
_READY_GOALS: Final = {1: Goal(0.8), _MANY: Goal(3.0)}
_MODELS: Final = 200
#: A bare interpreter that imports numpy, so often: what a worker cannot be below.
_BARE_RUNS: Final = 5


class Starting(Scenario):
    """An echo model with numpy and nothing else, with 1 and with 16 instances, and 200 models of one; each
    start is alone.
    """

    name = "starting"
    title = "start to ready, and memory of an idle server"
    goal = (
        "0.8 s with 1 instance and 3 s with 16; RSS 110 MB for supervisor and front, 45 MB for a worker; "
        "200 models: 12 s, 0.08 s of CPU a worker, PSS 3 GB"
    )
    servers: ClassVar = {
        "gpuserve": None,
        "triton": "the row `starts` of the other benchmarks has it",
    }

    def run(self, site: Site) -> list[Figure]:
        starts: dict[int, list[Start]] = {1: [], _MANY: []}
        for _ in range(site.effort.rounds):
            for count, runs in starts.items():
                with site.serving([SleepingModel("echo", 0.0, count)], f"starting-{count}") as one:
                    row("echo").check(one)
                    runs.append(start_of(one))
                    site.say(f"{count} instances: ready after {one.ready_s:.2f} s")
        times = [
            figure(f"{_instances(count)}, start to ready", "s", [{"s": one.ready_s} for one in runs], goal)
            for (count, runs), goal in zip(starts.items(), _READY_GOALS.values(), strict=True)
        ]
        memory = [one for count, runs in starts.items() for one in _memory(count, runs)]
        return [*times, *memory, *_many_models(site)]


def _memory(count: int, runs: list[Start]) -> tuple[Figure, Figure]:
    others: list[Seen] = []
    workers: list[Seen] = []
    for run in runs:
        rest = [one.memory for one in run.processes if one.role != "worker"]
        mine = [one.memory for one in run.processes if one.role == "worker"]
        rss, pss = (
            sum(values) / 1e6 for values in zip(*((m.rss_nbytes, m.pss_nbytes) for m in rest), strict=True)
        )
        others.append({"MB of RSS": rss, "PSS MB": pss})
        largest = max(one.rss_nbytes for one in mine)
        workers.append({"MB of RSS": largest / 1e6, "PSS MB": median(one.pss_nbytes for one in mine) / 1e6})
    return (
        figure(f"{_instances(count)}, supervisor and front", "MB of RSS", others, Goal(110.0)),
        figure(f"{_instances(count)}, the largest worker", "MB of RSS", workers, Goal(45.0)),
    )


def _many_models(site: Site) -> list[Figure]:
    ready: list[Seen] = []
    workers: list[Seen] = []
    memory: list[Seen] = []
    for _ in range(site.effort.rounds):
        bare_s = _bare_s()
        with site.serving(echoes(_MODELS), f"starting-{_MODELS}-models") as one:
            tree = processes.tree(one.pid)
            cpu_s = [each.cpu_s for each in tree if one.server.role(each.command) == "worker"]
            ready.append({"s": one.ready_s, "CPU s": sum(each.cpu_s for each in tree)})
            workers.append({"CPU s": sum(cpu_s) / len(cpu_s), "`import numpy`, CPU s": bare_s})
            memory.append({"MB": pss_nbytes(one) / 1e6})
            site.say(f"{_MODELS} models: ready after {one.ready_s:.2f} s")
    return [
        figure(f"{_MODELS} models, start to ready", "s", ready, Goal(12.0)),
        figure(f"{_MODELS} models, a worker's start", "CPU s", workers, Goal(0.08)),
        figure(f"{_MODELS} models, all processes", "MB of PSS", memory, Goal(3000.0)),
    ]


def _bare_s() -> float:
    """Return the CPU seconds of a process that imports numpy: the median of several."""
    taken = []
    for _ in range(_BARE_RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "import numpy"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return median(taken)


def _instances(count: int) -> str:
    return f"{count} instance{'s' * (count > 1)}"
