"""A million requests: whether memory grows with them."""

from __future__ import annotations

import time
from typing import ClassVar, Final

from benchmarks import processes
from benchmarks.scenarios.closed_loop import PROGRAM, InFlight
from benchmarks.scenarios.deployment import SleepingModel
from benchmarks.scenarios.figures import Figure, Goal, slope
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import Site
from benchmarks.servers import RunningServer

_PAYLOAD: Final = RowPayload("echo")
_LOAD: Final = InFlight(8, 16)
#: Between two looks at the memory; the first so many are the warm-up.
_STRIDE: Final = 100_000
#: For the answers of the last requests to be let go.
_SETTLE_S: Final = 0.3
_MIB: Final = 1 << 20
_GOAL: Final = Goal(4.0)


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
            answer = _PAYLOAD.check(one)
            _LOAD.run(one, _PAYLOAD, answer, requests=_STRIDE)
            seen = [_memory(one)]
            for number in range(max(1, site.effort.requests // _STRIDE)):
                _LOAD.run(one, _PAYLOAD, answer, requests=_STRIDE)
                seen.append(_memory(one))
                total = sum(rss for rss, _ in seen[-1].values())
                site.say(f"{(number + 1) * _STRIDE:,} requests: {total / _MIB:.2f} MiB")
        together = [_sum(look) for look in seen]
        return [
            _figure("all processes", together, _GOAL),
            *(_figure(role, [look[role] for look in seen], None) for role in seen[0]),
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


def _figure(case: str, looks: list[tuple[int, int]], goal: Goal | None) -> Figure:
    millions = [number * _STRIDE / 1e6 for number in range(len(looks))]
    rss, pss = ([look[kind] / _MIB for look in looks] for kind in (0, 1))
    details: dict[str, tuple[float, ...]] = {
        "RSS MiB first": (rss[0],),
        "RSS MiB last": (rss[-1],),
        "PSS MiB a million": (slope(millions, pss),),
    }
    return Figure(case, "MiB of RSS a million", (slope(millions, rss),), goal, details)
