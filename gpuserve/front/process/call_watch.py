"""Looks now and then at what all models run, and has calls ended that are not back in time: the front answers
for them, and the supervisor kills the worker, after it has logged where that stands. A worker of an attached
program is killed by that program. Where nobody does it, this front does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.running_calls import OverdueCall
from gpuserve.front.service.control import Say
from gpuserve.supervisor.control.front_messages import ExecutionHung

#: A worker that is to be killed has shown its stacks long before; then nobody else has killed it.
_GRACE_S: Final = 2.0
#: It is looked four times within the shortest limit, but no more often than the first of these says, nor less
#: often than the second; without any limit as the third says.
_SHORTEST_S: Final = 0.05
_LONGEST_S: Final = 0.4
_IDLE_S: Final = 1.0


def look_period_s(limits_s: Iterable[float]) -> float:
    """How long it takes until the next look, with these limits; 0 is none."""
    shortest_s = min((limit_s for limit_s in limits_s if limit_s), default=math.inf)
    return _IDLE_S if shortest_s == math.inf else min(_LONGEST_S, max(_SHORTEST_S, shortest_s / 4))


class ExecutionWatch:
    """The calls of all models of a front; ``drivers`` are those of its generations, by number. ``on_down`` is
    called with the name of a model of which an instance is given up.
    """

    def __init__(self, drivers: Mapping[int, ModelDriver], say: Say, on_down: Callable[[str], None]) -> None:
        self._drivers = drivers
        self._say = say
        self._on_down = on_down

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            period_s = look_period_s(one.spec.execution_timeout_s for one in self._drivers.values())
            self._look(loop.time(), period_s)
            await asyncio.sleep(period_s)

    def _look(self, now: float, period_s: float) -> None:
        for number, driver in tuple(self._drivers.items()):
            for overdue in driver.overdue.look(now, now + period_s):
                self._tell(number, driver, overdue)

    def _tell(self, number: int, driver: ModelDriver, overdue: OverdueCall) -> None:
        call, ran_s, limit_s = overdue
        link = driver.workers.instances.up.get(call.instance)
        if link is None or (limit_s and not driver.overdue.end(overdue, _GRACE_S)):
            return
        self._on_down(driver.spec.name)
        self._say(ExecutionHung(number, call.instance, link.pid, ran_s, limit_s))
