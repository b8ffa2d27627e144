"""Scenarios in a closed loop: h2load keeps a number of requests in flight."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import ClassVar, Final

from benchmarks import processes
from benchmarks.figures import Figure, Goal, slope
from benchmarks.scenarios.loads import PROGRAM, InFlight
from benchmarks.scenarios.scenario import RowPayload, Site, SleepingModel, pss_nbytes
from benchmarks.servers.server import RunningServer

_BATCH_S: Final = 0.002
_INSTANCES: Final = (1, 2, 4, 8)
#: In flight for each instance: no instance ever waits for a client.
_DEPTH: Final = 4
_GOAL: Final = Goal(0.95, at_least=True)


class Scaling:
    """h2load with four requests in flight for each instance; a batch is one row."""

    name: ClassVar[str] = "scaling"
    title: ClassVar[str] = "1 to 8 instances of a model that takes 2 ms"
    goal: ClassVar[str] = "throughput at least 0.95 times the instances times that of one"
    program: ClassVar[str | None] = PROGRAM
    servers: ClassVar[dict[str, str | None]] = {"gpuserve": None, "triton": None}

    def run(self, site: Site) -> list[Figure]:
        """A case for each number of instances; each is a model of its own on the same server."""
        models = [SleepingModel(_name(count), _BATCH_S, count, max_batch_size=1) for count in _INSTANCES]
        rates: dict[int, list[float]] = {count: [] for count in _INSTANCES}
        cpu_us: dict[int, list[float]] = {count: [] for count in _INSTANCES}
        with site.serving(models) as one:
            answers = {count: RowPayload(_name(count)).check(one) for count in _INSTANCES}
            for _ in range(site.effort.rounds):
                for count in _INSTANCES:
                    load, payload = InFlight(count, _DEPTH), RowPayload(_name(count))
                    rate, cpu = load.timed(one, payload, answers[count], site.effort.seconds)
                    rates[count].append(rate)
                    cpu_us[count].append(cpu)
                    site.say(f"{count} instances: {rate:.0f} req/s")
        return [_figure(count, rates, cpu_us) for count in _INSTANCES]


def _figure(count: int, rates: dict[int, list[float]], cpu_us: dict[int, list[float]]) -> Figure:
    linear = [rate / (count * alone) for rate, alone in zip(rates[count], rates[1], strict=True)]
    details = {
        "req/s": tuple(rates[count]),
        "of the sleep alone": tuple(rate * _BATCH_S / count for rate in rates[count]),
        "server CPU µs a request": tuple(cpu_us[count]),
    }
    case = f"{count} instance{'s' * (count > 1)}"
    return Figure(case, "of linear", tuple(linear), _GOAL if count > 1 else None, details)


def _name(instances: int) -> str:
    return f"sleep-{instances}"


_MODELS: Final = 200
_PAYLOAD: Final = RowPayload("echo")
_LOAD: Final = InFlight(8, 16)
_MANY_MODELS_GOAL: Final = Goal(0.97, at_least=True)


class ManyModels:
    """h2load with 128 in flight on an echo model. Both servers are up; they are loaded in turns."""

    name: ClassVar[str] = "many-models"
    title: ClassVar[str] = "200 models loaded, traffic on one"
    goal: ClassVar[str] = "throughput at least 0.97 times that with 1 model loaded"
    program: ClassVar[str | None] = PROGRAM
    servers: ClassVar[dict[str, str | None]] = {
        "gpuserve": None,
        "triton": "200 stubs with an interpreter each do not fit beside this server's 200 workers",
    }

    def run(self, site: Site) -> list[Figure]:
        with ExitStack() as stack:
            up = {
                count: stack.enter_context(site.serving(_models(count), f"models-{count}"))
                for count in (1, _MODELS)
            }
            answers = {count: _PAYLOAD.check(one) for count, one in up.items()}
            seen: dict[int, list[tuple[float, float]]] = {count: [] for count in up}
            for turn in range(site.effort.rounds + 1):
                for count in sorted(up, reverse=bool(turn % 2)):
                    rate, cpu_us = _LOAD.timed(up[count], _PAYLOAD, answers[count], site.effort.seconds)
                    site.say(f"{count} models: {rate:.0f} req/s")
                    if turn:  # the first warms up
                        seen[count].append((rate, cpu_us))
            pss = pss_nbytes(up[_MODELS])
        ratios = [many[0] / one[0] for many, one in zip(seen[_MODELS], seen[1], strict=True)]
        details = {
            "req/s": tuple(rate for rate, _ in seen[_MODELS]),
            "req/s with 1 model": tuple(rate for rate, _ in seen[1]),
            "server CPU µs a request": tuple(cpu_us for _, cpu_us in seen[_MODELS]),
            "the same with 1 model": tuple(cpu_us for _, cpu_us in seen[1]),
            "ready after s": (up[_MODELS].ready_s,),
            "PSS MB": (pss / 1e6,),
        }
        return [Figure(f"{_MODELS} models", "of 1 model loaded", tuple(ratios), _MANY_MODELS_GOAL, details)]


def _models(count: int) -> list[SleepingModel]:
    return [SleepingModel("echo" if not number else f"echo-{number}", 0.0) for number in range(count)]


_ENDURANCE_PAYLOAD: Final = RowPayload("echo")
_ENDURANCE_LOAD: Final = InFlight(8, 16)
#: Between two looks at the memory; the first so many are the warm-up.
_STRIDE: Final = 100_000
#: For the answers of the last requests to be let go.
_SETTLE_S: Final = 0.3
_MIB: Final = 1 << 20
_ENDURANCE_GOAL: Final = Goal(4.0)


class Endurance:
    """h2load with 128 in flight, a hundred thousand requests at a time, and a look at the memory after each.

    The slope is that of the straight line through what was seen after the warm-up, for a million requests.
    """

    name: ClassVar[str] = "endurance"
    title: ClassVar[str] = "a million requests"
    goal: ClassVar[str] = "RSS of all processes grows by at most 4 MiB in a million requests"
    program: ClassVar[str | None] = PROGRAM
    servers: ClassVar[dict[str, str | None]] = {"gpuserve": None, "triton": None}

    def run(self, site: Site) -> list[Figure]:
        """All processes together, and each by itself. One round: a second one would be another million."""
        with site.serving([SleepingModel("echo", 0.0, max_batch_size=64)]) as one:
            answer = _ENDURANCE_PAYLOAD.check(one)
            _ENDURANCE_LOAD.run(one, _ENDURANCE_PAYLOAD, answer, requests=_STRIDE)
            seen = [_memory(one)]
            for number in range(max(1, site.effort.requests // _STRIDE)):
                _ENDURANCE_LOAD.run(one, _ENDURANCE_PAYLOAD, answer, requests=_STRIDE)
                seen.append(_memory(one))
                total = sum(rss for rss, _ in seen[-1].values())
                site.say(f"{(number + 1) * _STRIDE:,} requests: {total / _MIB:.2f} MiB")
        together = [_sum(look) for look in seen]
        return [
            _endurance_figure("all processes", together, _ENDURANCE_GOAL),
            *(_endurance_figure(role, [look[role] for look in seen], None) for role in seen[0]),
        ]


def _memory(one: RunningServer) -> dict[str, tuple[int, int]]:
    """RSS and PSS by the role of the process; roles that are there twice are counted together."""
    time.sleep(_SETTLE_S)
    seen: dict[str, tuple[int, int]] = {}
    for process in processes.tree(one.pid):
        memory, role = process.memory, one.server.role(process.command)
        rss, pss = seen.get(role, (0, 0))
        seen[role] = rss + memory.rss_nbytes, pss + memory.pss_nbytes
    return seen


def _sum(look: dict[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(rss for rss, _ in look.values()), sum(pss for _, pss in look.values())


def _endurance_figure(case: str, looks: list[tuple[int, int]], goal: Goal | None) -> Figure:
    millions = [number * _STRIDE / 1e6 for number in range(len(looks))]
    rss, pss = ([look[kind] / _MIB for look in looks] for kind in (0, 1))
    details: dict[str, tuple[float, ...]] = {
        "RSS MiB first": (rss[0],),
        "RSS MiB last": (rss[-1],),
        "PSS MiB a million": (slope(millions, pss),),
    }
    return Figure(case, "MiB of RSS a million", (slope(millions, rss),), goal, details)
