"""200 models loaded and traffic on one: throughput beside a server that has only that one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar, Final

from benchmarks.scenarios.closed_loop import PROGRAM, InFlight
from benchmarks.scenarios.deployment import SleepingModel
from benchmarks.scenarios.figures import Figure, Goal
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import Site, pss_nbytes

_MODELS: Final = 200
_PAYLOAD: Final = RowPayload("echo")
_LOAD: Final = InFlight(8, 16)
_GOAL: Final = Goal(0.97, at_least=True)


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
        """Run one case."""
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
        return [Figure(f"{_MODELS} models", "of 1 model loaded", tuple(ratios), _GOAL, details)]


def _models(count: int) -> list[SleepingModel]:
    return [SleepingModel("echo" if not number else f"echo-{number}", 0.0) for number in range(count)]
