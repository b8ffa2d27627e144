"""Cases of an open loop on models that sleep: a number of instances and a load, each once a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.scenarios.deployment import SleepingModel
from benchmarks.scenarios.payload import RowPayload
from benchmarks.scenarios.scenario import FIRST_SEED, Site
from benchmarks.servers import RunningServer

#: Instances, and the load that they are given.
Case = tuple[int, float]
#: What was seen in one run, by the column that shows it.
Seen = dict[str, float]
#: Site, server, right answer, instances, load, seed.
Measure = Callable[[Site, RunningServer, bytes, int, float, int], Seen]


def name_of(instances: int) -> str:
    """The model that sleeps on so many instances."""
    return f"sleep-{instances}"


def seen_in_rounds(
    site: Site,
    cases: Sequence[Case],
    batch_s: float,
    max_rows: int,
    measure: Measure,
    tell: Callable[[Case, Seen], str],
) -> dict[Case, list[Seen]]:
    """What was seen of each case, a round after the other, on one server with all models."""
    counts = sorted({instances for instances, _ in cases})
    models = [SleepingModel(name_of(count), batch_s, count, max_rows) for count in counts]
    rounds: dict[Case, list[Seen]] = {case: [] for case in cases}
    with site.serving(models) as one:
        answers = {count: RowPayload(name_of(count)).check(one) for count in counts}
        for turn in range(site.effort.rounds):
            for case in cases:
                seen = measure(site, one, answers[case[0]], *case, FIRST_SEED + turn)
                rounds[case].append(seen)
                site.say(f"round {turn + 1}  {tell(case, seen)}")
    return rounds
