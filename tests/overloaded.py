"""A model's scheduler under Poisson arrivals with deadlines, simulated: no clock but its own."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scheduled import model_spec

from gpuserve.core.errors import QueueFull
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest


@dataclass(slots=True)
class Outcome:
    """What became of the requests: which ended when, and which were refused."""

    ended: dict[QueuedRequest, float]
    refused: list[QueuedRequest]
    batches: int = 0

    @property
    def in_time(self) -> int:
        return sum(one.deadline is None or at <= one.deadline for one, at in self.ended.items())

    @property
    def late(self) -> int:
        return len(self.ended) - self.in_time


def poisson(rate_hz: float, seconds: float, timeout_s: float | None, seed: int) -> list[tuple[float, Any]]:
    source, now, found = random.Random(seed), 0.0, []
    while (now := now + source.expovariate(rate_hz)) < seconds:
        found.append((now, timeout_s))
    return found


def simulate(
    arrivals: Iterable[tuple[float, float | None]],
    takes_s: Callable[[int], float],
    *,
    instances: int = 1,
    known: Iterable[tuple[int, float]] = (),
    **options: Any,
) -> Outcome:
    """Run requests (when, time limit) of one row on instances that take so long for a batch of so many rows.
    ``known`` is what the scheduler has seen before.
    """
    scheduler = ModelScheduler(model_spec(**options))
    for number in range(instances):
        scheduler.instance_up(f"i{number}")
    for rows, seconds in known:
        scheduler._slots.service_time.observe(rows, seconds)
    outcome = Outcome({}, [])
    order = itertools.count()
    events: list[tuple[float, int, Any, float]] = []
    for at, timeout_s in arrivals:
        deadline = None if timeout_s is None else at + timeout_s
        heapq.heappush(events, (at, next(order), QueuedRequest(1, 1, "", deadline), 0.0))
    woken_at = -1.0
    free_at = {f"i{number}": 0.0 for number in range(instances)}
    while events:
        now, _, what, took_s = heapq.heappop(events)
        if isinstance(what, QueuedRequest):
            try:
                scheduler.submit(what, now)
            except QueueFull:
                outcome.refused.append(what)
        elif what is not None:
            scheduler.complete(what.batch_id, took_s, now)
            outcome.ended.update(dict.fromkeys(what.requests, now))
            outcome.batches += 1
        outcome.refused += scheduler.expire(now)
        while (batch := scheduler.next_batch(now)) is not None:
            seconds = takes_s(batch.rows)
            ends_at = free_at[batch.instance] = max(now, free_at[batch.instance]) + seconds
            heapq.heappush(events, (ends_at, next(order), batch, seconds))
        wakeup = scheduler.next_wakeup(now)
        if wakeup is not None and not (now < woken_at <= wakeup):
            woken_at = wakeup
            heapq.heappush(events, (wakeup, next(order), None, 0.0))
    return outcome
