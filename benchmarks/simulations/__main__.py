"""``python -m benchmarks.simulations [--prefetch 0] [--fronts 4] [--requests 16000]``: the cases of several
fronts, simulated, as Markdown. Under a minute of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from benchmarks.scenarios.arrivals import Schedule, poisson
from benchmarks.scenarios.figures import percentile
from benchmarks.scenarios.ideal import capacity_hz, ideal_latencies
from benchmarks.simulations.fronts import Simulation
from benchmarks.simulations.outcome import Outcome, outcome
from benchmarks.simulations.setting import Costs, Deployment, Model, Sharing, hashed, in_turns

_SEED: Final = 20
_WORKERS: Final = 8
_LOADS: Final = (0.5, 0.8, 0.95)
#: By their labels: how many, and whether a hash spreads them over the fronts.
_CONNECTIONS: Final = {
    "1": (1, True),
    "4": (4, True),
    "4, in turns": (4, False),
    "32": (32, True),
    "256": (256, True),
}
_SHARED: Final = (Sharing.DIVIDED, Sharing.SLOT_EACH, Sharing.LENT_TO_OLDEST)
_FAST, _SMALL, _SLOW = Model(0.005, 32), Model(0.002, 8), Model(0.02, 16)
_US: Final = 1e-6
#: Models with what a request costs the front, in µs: 15 to 30 with 64 bytes, 500 and 1000 with 1 MiB.
_COSTS_US: Final = {_FAST: (15, 20, 30), _SMALL: (15, 20, 30), _SLOW: (20, 500, 1000)}
_CASES: Final = tuple((model, cost * _US) for model, costs in _COSTS_US.items() for cost in costs)
#: One front is the limit where its p99 is so many times that of several.
_LIMIT: Final = 1.2


@dataclass(frozen=True, slots=True)
class Effort:
    """The options of the command line."""

    fronts: int
    prefetch: int
    requests: int

    def deployment(self, model: Model, request_s: float, sharing: Sharing) -> Deployment:
        """A deployment of several fronts."""
        return Deployment(model, Costs(request_s), self.fronts, _WORKERS, sharing, self.prefetch)

    def schedule(self, rate_hz: float, connections: int) -> Schedule:
        """A schedule of arrivals at a rate."""
        return poisson(rate_hz, self.requests / rate_hz, connections, _SEED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulations")
    parser.add_argument("--fronts", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--prefetch", type=int, default=1, help="default: %(default)s, as on a GPU")
    parser.add_argument("--requests", type=int, default=16_000, help="a run; default: %(default)s")
    effort = Effort(**vars(parser.parse_args(arguments)))
    for lines in (limits(effort), figures(effort), quiet(effort)):
        for line in lines:
            print(line, flush=True)
        print()


def limits(effort: Effort) -> Iterator[str]:
    """The table with the limits of one front."""
    yield f"| model | front CPU a request | one front at most, req/s | of {_WORKERS} workers | limit from |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for model, request_s in _CASES:
        costs = Costs(request_s)
        most_hz = 1 / (costs.request_s + costs.batch_s / model.max_rows)
        part = most_hz / capacity_hz(_WORKERS, model.batch_s, model.max_rows)
        found = limit(effort, model, request_s)
        beyond = "never" if found is None else f"{found:.0%}"
        yield f"| {_name(model)} | {request_s / _US:.0f} µs | {most_hz:,.0f} | {part:.0%} | {beyond} |"


def limit(effort: Effort, model: Model, request_s: float) -> float | None:
    """The load, in steps of 5 % of what the workers could do, from which on one front has a longer tail than
    several; None: there is none up to 95 %.
    """
    layout, low, high = in_turns(256, effort.fronts), 0, 20
    while high - low > 1:
        load = (low + high) // 2
        schedule = effort.schedule(load / 20 * _capacity_hz(model), 256)
        several = effort.deployment(model, request_s, Sharing.LENT_TO_OLDEST)
        alone = replace(several, fronts=1, sharing=Sharing.DIVIDED)
        p99_s = outcome(Simulation(alone, schedule, (0,) * 256).run()).p99_s
        if p99_s > _LIMIT * outcome(Simulation(several, schedule, layout).run()).p99_s:
            high = load
        else:
            low = load
    return None if high == 20 else high / 20


def figures(effort: Effort) -> Iterator[str]:
    """Every case: requests a second, p50 and p99 in ms, rows a batch."""
    yield (
        f"| model, front CPU, load | connections | ideal | 1 front | "
        f"{' | '.join(f'{effort.fronts} fronts, {one.value}' for one in _SHARED)} |"
    )
    yield "| --- | --- | --- | --- " + "| --- " * len(_SHARED) + "|"
    for model, request_s in _CASES:
        for load in _LOADS:
            for label in _CONNECTIONS:
                yield _row(effort, model, request_s, load, label)


def _row(effort: Effort, model: Model, request_s: float, load: float, label: str) -> str:
    connections, is_hashed = _CONNECTIONS[label]
    rate_hz = load * _capacity_hz(model)
    schedule = effort.schedule(rate_hz, connections)
    layout = _hashed(connections, effort.fronts) if is_hashed else in_turns(connections, effort.fronts)
    ideal = ideal_latencies(schedule.at_s, _WORKERS, model.batch_s, model.max_rows)
    alone = replace(effort.deployment(model, request_s, Sharing.DIVIDED), fronts=1)
    cells = [_cell(outcome(Simulation(alone, schedule, (0,) * connections).run()), rate_hz)]
    for sharing in _SHARED:
        run = Simulation(effort.deployment(model, request_s, sharing), schedule, layout).run()
        cells.append(_cell(outcome(run), rate_hz))
    case = f"{_name(model)}, {request_s / _US:.0f} µs, {load:.0%} ({rate_hz:,.0f}/s)"
    best = f"{percentile(ideal, 50) * 1e3:.1f} / {percentile(ideal, 99) * 1e3:.1f}"
    return f"| {case} | {label} | {best} | {' | '.join(cells)} |"


def quiet(effort: Effort) -> Iterator[str]:
    """A front with one of 100 connections beside others that have the rest: who gets the slots."""
    yield "| model, load | slots are | all: p50 / p99 ms, rows | the quiet front: p99 ms |"
    yield "| --- | --- | ---: | ---: |"
    layout = (*(connection % (effort.fronts - 1) + 1 for connection in range(99)), 0)
    for model in (_FAST, _SMALL):
        for load in _LOADS:
            schedule = effort.schedule(load * _capacity_hz(model), 100)
            for sharing in (Sharing.LENT_TO_MOST, Sharing.LENT_TO_OLDEST):
                deployment = effort.deployment(model, 20 * _US, sharing)
                seen = outcome(Simulation(deployment, schedule, layout).run())
                figures = f"{seen.p50_s * 1e3:.1f} / {seen.p99_s * 1e3:.1f}, {seen.mean_rows:.1f}"
                quiet_ms = seen.quiet_p99_s * 1e3
                yield f"| {_name(model)}, {load:.0%} | {sharing.value} | {figures} | {quiet_ms:.1f} |"


def _cell(seen: Outcome, rate_hz: float) -> str:
    kept = "" if seen.throughput_hz > 0.97 * rate_hz else "**grows**, "
    latency = f"{seen.p50_s * 1e3:.1f} / {seen.p99_s * 1e3:.1f}"
    return f"{kept}{seen.throughput_hz:,.0f}/s, {latency}, {seen.mean_rows:.1f} rows"


@cache
def _hashed(connections: int, fronts: int) -> tuple[int, ...]:
    return hashed(connections, fronts, _SEED)


def _capacity_hz(model: Model) -> float:
    return capacity_hz(_WORKERS, model.batch_s, model.max_rows)


def _name(model: Model) -> str:
    return f"{model.batch_s * 1e3:.0f} ms ≤ {model.max_rows}"


if __name__ == "__main__":
    main()
