"""Who leaves a queue for others: who could not end in time, and who has more than its share of a full one
(``front/queueing/fair_queue.py``). Pure.

A request with a deadline is not begun when the batch that it would be in is expected to end after it
(``service_time.py``). Of those that can be in time the oldest go first. Three things bound what an estimate
may do:

- while nothing is known of how long a batch takes, all are run;
- what would be idle runs: where nobody waits who can be in time, and an instance is free, those who probably
  cannot are tried. So an estimate that is too high is corrected by the next batches;
- only while more waits than goes into the batch, a part of its time must be left over besides: the answer has
  a way to go, and of two batches of the same size one takes longer. Without others that time is used.

Requests without a deadline are never refused here.
"""

from __future__ import annotations

import math
from typing import Final

from gpuserve.front.batching.batch_former import BatchFormer
from gpuserve.front.batching.interface import RequestCounts
from gpuserve.front.batching.service_time import ServiceTime
from gpuserve.front.queueing.queue import QueuedRequest, RemovalReason, RequestQueue

#: What must be left over while others wait: this part of a batch's time, and at least so much.
_SPARE: Final = 0.5
_LEAST_SPARE_S: Final = 1e-3


class Eviction:
    """Takes requests out of one queue that are in the way of others. ``evicted`` are still to be answered."""

    def __init__(
        self, queue: RequestQueue, former: BatchFormer, service_time: ServiceTime, counts: RequestCounts
    ) -> None:
        self._queue = queue
        self._former = former
        self._service_time = service_time
        self._counts = counts
        self.evicted: list[QueuedRequest] = []

    def push_in(self, request: QueuedRequest, now: float) -> None:
        """Queue a request that found no room, in the place of those of a client that has more than its own
        has; QueueFull: there is none.
        """
        while (crowding := self._queue.crowding(request)) is not None:
            self._former.dissolve(self._queue.waiting)
            self._evict(crowding, RemovalReason.CROWDING)
        self._queue.add(request, now)

    def evict_hopeless(self, now: float) -> None:
        """While others wait, take those out who could not be in time if they were begun now and alone."""
        least_s, queue = self._service_time.estimate(1), self._queue
        if least_s is None:
            return
        while queue.requests > 1 and (hopeless := queue.first_late(now + least_s)) is not None:
            self._former.dissolve(self._queue.waiting)
            self._evict(hopeless, RemovalReason.HOPELESS)

    def in_time(
        self, requests: list[QueuedRequest], begins_at: float, formed_at: float
    ) -> list[QueuedRequest] | None:
        """The next batch, formed as of ``formed_at``, or the one after it without those of it that cannot be
        in time; None: there is none yet. ``formed_at`` is minus infinity for one that begins behind others.
        """
        queue, is_held = self._queue, formed_at == -math.inf
        while late := self._late(requests, begins_at, 2 if is_held else 1):
            if len(late) == queue.requests and not is_held:
                break
            queue.waiting.extendleft(reversed(requests))
            for one in late:
                self._evict(one, RemovalReason.HOPELESS)
            again = self._former.form(queue.waiting, formed_at) if queue.requests else None
            if again is None:
                return None
            requests = again
        return requests

    def _late(self, requests: list[QueuedRequest], begins_at: float, spares: int) -> list[QueuedRequest]:
        """Those of a batch that will not be in time if it begins then; so many batches may take longer."""
        rows = sum([one.rows for one in requests])
        takes_s = self._service_time.estimate(rows)
        if takes_s is None:
            return []
        ends_at = begins_at + takes_s
        if self._queue.rows >= 2 * rows:
            ends_at += spares * max(_LEAST_SPARE_S, _SPARE * takes_s)
        return [one for one in requests if one.deadline is not None and one.deadline < ends_at]

    def _evict(self, request: QueuedRequest, reason: RemovalReason) -> None:
        self._queue.remove(request, "expire")
        request.removal_reason = reason
        self.evicted.append(request)
        self._counts.expired += 1
