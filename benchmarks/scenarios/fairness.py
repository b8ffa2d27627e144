"""Two clients of one model: what a quiet one is answered while another sends five times its share."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final

from benchmarks.scenarios.arrivals import poisson
from benchmarks.scenarios.deployment import SleepingModel
from benchmarks.scenarios.figures import Figure, Goal, percentile
from benchmarks.scenarios.ideal import capacity_hz
from benchmarks.scenarios.open_loop import paced
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import FIRST_SEED, Site
from benchmarks.servers import RunningServer

_BATCH_S: Final = 0.02
_MAX_ROWS: Final = 8
_HEADER: Final = "x-client"
#: By client, what it sends as a multiple of its share, which is half of the capacity.
_LOADS: Final = {"quiet": 1.0, "loud": 5.0}
_CONNECTIONS: Final = 4
#: An answer that comes within so many seconds is one to a client that waits.
_PATIENCE_S: Final = 1.0
_WARM_UP_S: Final = 1.0
_GOAL: Final = Goal(0.9, at_least=True)


class Fairness:
    """Poisson arrivals from a client that keeps to its share, and from one that does not."""

    name: ClassVar[str] = "fairness"
    title: ClassVar[str] = (
        "two clients of a model that takes 20 ms a batch of up to 8 rows, open loop: one sends half of the "
        "capacity, the other five times as much"
    )
    goal: ClassVar[str] = "of the quiet client's requests at least 0.9 are answered within a second"
    program: ClassVar[str | None] = None
    servers: ClassVar[dict[str, str | None]] = {"gpuserve": None, "triton": "it knows no fairness"}

    def run(self, site: Site) -> list[Figure]:
        """With fairness and, for comparison, without."""
        models = [
            SleepingModel("fair", _BATCH_S, 1, _MAX_ROWS, _HEADER),
            SleepingModel("unfair", _BATCH_S, 1, _MAX_ROWS),
        ]
        rounds: dict[str, list[dict[str, float]]] = {one.name: [] for one in models}
        with site.serving(models) as one:
            for turn in range(site.effort.rounds):
                for name, found in rounds.items():
                    found.append(_measure(site, one, name, FIRST_SEED + 2 * turn))
                    site.say(f"round {turn + 1}  {name}: {found[-1]['quiet']:.3f} of the quiet client's")
        return [_figure("fairness: client", rounds["fair"], _GOAL), _figure("none", rounds["unfair"], None)]


def _measure(site: Site, one: RunningServer, model: str, seed: int) -> dict[str, float]:
    payload, seconds = RowPayload(model), site.effort.seconds
    answer = payload.check(one)
    share_hz = capacity_hz(1, _BATCH_S, _MAX_ROWS) / len(_LOADS)
    with ThreadPoolExecutor(len(_LOADS)) as clients:
        running = []
        for number, (client, load) in enumerate(_LOADS.items()):
            schedule = poisson(load * share_hz, _WARM_UP_S + seconds, _CONNECTIONS, seed + number)
            headers = [f"{_HEADER}:{client}"]
            run = clients.submit(paced, one, payload, answer, schedule, headers=headers)
            running.append((client, schedule, run))
        found: dict[str, float] = {}
        for client, schedule, run in running:
            first = next(index for index, at in enumerate(schedule.at_s) if at >= _WARM_UP_S)
            latency_s = run.result().latency_s[first:]
            found[client] = sum(one <= _PATIENCE_S for one in latency_s) / len(latency_s)
            found[f"{client}, share"] = sum(map(math.isfinite, latency_s)) / seconds / share_hz
            found[f"{client}, p50 ms"] = percentile(latency_s, 50) * 1e3
    return found


def _figure(case: str, rounds: list[dict[str, float]], goal: Goal | None) -> Figure:
    columns = {name: tuple(seen[name] for seen in rounds) for name in rounds[0]}
    quiet = columns.pop("quiet")
    return Figure(case, "of the quiet client's requests", quiet, goal, columns)
