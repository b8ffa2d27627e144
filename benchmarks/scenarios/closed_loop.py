"""Scenarios in a closed loop: h2load keeps a number of requests in flight."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import ClassVar, Final

from benchmarks import processes
from benchmarks.figures import Figure, Goal, slope
from benchmarks.load import GrpcLoad
from benchmarks.scenarios.scenario import Scenario, Seen, Site, SleepingModel, figure, pss_nbytes, row, timed
from benchmarks.servers.server import RunningServer

_ECHO: Final = row("echo")
_BATCH_S: Final = 0.002
_INSTANCES: Final = (1, 2, 4, 8)
#: In flight for each instance: no instance ever waits for a client.
_DEPTH: Final = 4
_LINEAR_GOAL: Final = Goal(0.95, at_least=True)


class Scaling(Scenario):
    """h2load with four requests in flight for each instance; a batch is one row."""

    name = "scaling"
    title = "1 to 8 instances of a model that takes 2 ms"
    goal = "throughput at least 0.95 times the instances times that of one"
    program = "h2load"

    def run(self, site: Site) -> list[Figure]:
        """Measure each number of instances, each a model of its own on the same server."""
        names = {count: f"sleep-{count}" for count in _INSTANCES}
        models = [SleepingModel(name, _BATCH_S, count, max_batch_size=1) for count, name in names.items()]
        seen: dict[int, list[Seen]] = {count: [] for count in names}
        with site.serving(models) as one:
            answers = {count: row(name).check(one) for count, name in names.items()}
            for _ in range(site.effort.rounds):
                alone = 0.0
                for count, name in names.items():
                    load = GrpcLoad(row(name), count, _DEPTH)
                    rate, cpu_us = timed(load, one, answers[count], site.effort.seconds)
                    alone = alone or rate
                    of_sleep = rate * _BATCH_S / count
                    seen[count].append(
                        {
                            "of linear": rate / (count * alone),
                            "req/s": rate,
                            "of the sleep alone": of_sleep,
                            "server CPU µs a request": cpu_us,
                        }
                    )
                    site.say(f"{count} instances: {rate:.0f} req/s")
        return [
            figure(
                f"{count} instance{'s' * (count > 1)}", "of linear", runs, _LINEAR_GOAL if count > 1 else None
            )
            for count, runs in seen.items()
        ]


_MODELS: Final = 200
_LOAD: Final = GrpcLoad(_ECHO, 8, 16)
_MANY_MODELS_GOAL: Final = Goal(0.97, at_least=True)


class ManyModels(Scenario):
    """h2load with 128 in flight on an echo model. Both servers are up; they are loaded in turns."""

    name = "many-models"
    title = "200 models loaded, traffic on one"
    goal = "throughput at least 0.97 times that with 1 model loaded"
    program = "h2load"
    servers: ClassVar = {
        "gpuserve": None,
        "triton": "200 stubs with an interpreter each do not fit beside this server's 200 workers",
    }

    def run(self, site: Site) -> list[Figure]:
        with ExitStack() as stack:
            up = {
                count: stack.enter_context(site.serving(echoes(count), f"models-{count}"))
                for count in (1, _MODELS)
            }
            answers = {count: _ECHO.check(one) for count, one in up.items()}
            seen: dict[int, list[tuple[float, float]]] = {count: [] for count in up}
            for turn in range(site.effort.rounds + 1):
                for count in sorted(up, reverse=bool(turn % 2)):
                    rate, cpu_us = timed(_LOAD, up[count], answers[count], site.effort.seconds)
                    site.say(f"{count} models: {rate:.0f} req/s")
                    if turn:  # the first warms up
                        seen[count].append((rate, cpu_us))
            pss = pss_nbytes(up[_MODELS])
        rounds = [
            {
                "of 1 model loaded": rate / alone,
                "req/s": rate,
                "req/s with 1 model": alone,
                "server CPU µs a request": cpu_us,
                "the same with 1 model": alone_cpu_us,
                "ready after s": up[_MODELS].ready_s,
                "PSS MB": pss / 1e6,
            }
            for (rate, cpu_us), (alone, alone_cpu_us) in zip(seen[_MODELS], seen[1], strict=True)
        ]
        return [figure(f"{_MODELS} models", "of 1 model loaded", rounds, _MANY_MODELS_GOAL)]


def echoes(count: int) -> list[SleepingModel]:
    """Return so many models that only echo; the first one is ``echo``."""
    return [SleepingModel("echo" if not number else f"echo-{number}", 0.0) for number in range(count)]


#: Requests between two readings of the memory; the first so many are the warm-up.
_STRIDE: Final = 100_000
_STRIDE_LOAD: Final = GrpcLoad(_ECHO, 8, 16, requests=_STRIDE)
#: For the server to free what it kept for the last requests.
_SETTLE_S: Final = 0.3
_MIB: Final = 1 << 20
_ENDURANCE_GOAL: Final = Goal(4.0)


class Endurance(Scenario):
    """h2load with 128 in flight, a hundred thousand requests at a time, and a reading of the memory after
    each. The slope, for a million requests, is that of the straight line through the readings after the
    warm-up.
    """

    name = "endurance"
    title = "a million requests"
    goal = "RSS of all processes grows by at most 4 MiB in a million requests"
    program = "h2load"

    def run(self, site: Site) -> list[Figure]:
        """All processes together, and each by itself. One round: a second one would be another million."""
        with site.serving([SleepingModel("echo", 0.0, max_batch_size=64)]) as one:
            answer = _ECHO.check(one)
            _STRIDE_LOAD.run(one, 0.0, answer)
            seen = [_memory(one)]
            for number in range(max(1, site.effort.requests // _STRIDE)):
                _STRIDE_LOAD.run(one, 0.0, answer)
                seen.append(_memory(one))
                total = sum(rss for rss, _ in seen[-1].values())
                site.say(f"{(number + 1) * _STRIDE:,} requests: {total / _MIB:.2f} MiB")
        together = [tuple(map(sum, zip(*look.values(), strict=True))) for look in seen]
        return [
            _growth("all processes", together, _ENDURANCE_GOAL),
            *(_growth(role, [look[role] for look in seen], None) for role in seen[0]),
        ]


def _memory(one: RunningServer) -> dict[str, tuple[int, int]]:
    """Return RSS and PSS by the role of the process; processes of one role are counted together."""
    time.sleep(_SETTLE_S)
    seen: dict[str, tuple[int, int]] = {}
    for process in processes.tree(one.pid):
        memory, role = process.memory, one.server.role(process.command)
        rss, pss = seen.get(role, (0, 0))
        seen[role] = rss + memory.rss_nbytes, pss + memory.pss_nbytes
    return seen


def _growth(case: str, looks: list[tuple[int, ...]], goal: Goal | None) -> Figure:
    millions = [number * _STRIDE / 1e6 for number in range(len(looks))]
    rss, pss = ([look[kind] / _MIB for look in looks] for kind in (0, 1))
    seen = {
        "MiB of RSS a million": slope(millions, rss),
        "RSS MiB first": rss[0],
        "RSS MiB last": rss[-1],
        "PSS MiB a million": slope(millions, pss),
    }
    return figure(case, "MiB of RSS a million", [seen], goal)
