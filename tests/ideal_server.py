"""The ideal single-queue batch server, simulated. Pure.

Ideal means that nothing but the model takes time. All requests wait in one queue, first come first served.
At the moment at which an instance is free and a request waits, the instance takes the oldest requests that
wait, at most ``max_rows`` of them, and answers them together exactly ``batch_s`` later. It never waits for
more of them, knows nothing of those to come, and there is no time between a request and the queue, between
two batches, or between the end of a batch and its answers. It is the greedy one: instances that end together
share what waits unevenly, and a server that keeps them apart in time could have a shorter tail.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence


def ideal_latencies(
    arrivals_s: Sequence[float], instances: int, batch_s: float, max_rows: int
) -> list[float]:
    """From the arrival of each request to its answer, in seconds.

    Args:
        arrivals_s: in order; requests of one row each.

    Raises:
        ValueError: no instance, or batches without a row.
    """
    if instances < 1 or max_rows < 1:
        raise ValueError(f"{instances} instances with batches of {max_rows} rows answer nothing")
    free_at = [0.0] * instances
    latencies: list[float] = []
    first = 0
    while first < len(arrivals_s):
        begins_at = max(free_at[0], arrivals_s[first])
        # Who arrives at the very moment still goes along.
        end = bisect_right(arrivals_s, begins_at, first, min(len(arrivals_s), first + max_rows))
        ends_at = begins_at + batch_s
        latencies += [ends_at - arrived_at for arrived_at in arrivals_s[first:end]]
        heapq.heapreplace(free_at, ends_at)
        first = end
    return latencies
