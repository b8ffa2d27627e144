"""More instances of a model that takes 2 ms a request: throughput beside that of one instance."""

from __future__ import annotations

from typing import ClassVar, Final

from benchmarks.scenarios.closed_loop import PROGRAM, InFlight
from benchmarks.scenarios.deployment import SleepingModel
from benchmarks.scenarios.figures import Figure, Goal
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import Site

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
