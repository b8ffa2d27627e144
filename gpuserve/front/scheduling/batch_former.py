"""Batch formation by Triton's rules, and eviction of requests, over queues that callers own. Pure."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Final

from gpuserve.front.scheduling.request_queue import (
    EMPTY_ROW,
    GroupedRequests,
    PaddedRow,
    QueuedRequest,
    RemovalReason,
    RequestQueue,
    RequestState,
    WaitingRequests,
    first_queued,
)
from gpuserve.front.scheduling.scheduler import RequestCounts
from gpuserve.front.scheduling.shape_groups import ShapeGroup, ShapeGroups
from gpuserve.front.scheduling.slots import ServiceTime
from gpuserve.model.spec import BatchingSpec

# Compared once per request: a look-up on an Enum class costs ten times a look-up of a global.
_QUEUED: Final = RequestState.QUEUED
_ENQUEUED_AT: Final = operator.attrgetter("enqueued_at")
#: Attempts to form a batch after which a lowered limit of elements doubles.
_GROWTH_BATCHES: Final = 1024


class BatchFormer:
    """Decides which requests at the head of the queue make the next batch, or whether to wait for more.

    Requests of one merge key are walked in the order in which they wait, and taken until the batch is
    *closed*, because the next request would exceed ``max_batch_size``, ``max_batch_nbytes``, or
    ``max_batch_elements`` with all rows padded to one shape, or until there are no more. *best* is the
    largest preferred size that the walk reached, or else all requests before the one that exceeded the
    largest preferred size. The age of the oldest taken request then decides:

    1. best, and the delay has not expired: send exactly best.
    2. closed, or at least the largest preferred size: send all taken requests.
    3. the delay has expired, or there is none: send all taken requests.
    4. wait.

    Without preferred sizes, ``max_batch_size`` is the only one. A model that does not merge sends every
    request by itself, at once. ``by_age`` states that the first waiting request is always the oldest.

    If the queue has groups (``ShapeGroups``), the walk starts with the leading group. If rule 4 applies to
    this group, the first full group of the same lane goes instead, unless the delay has expired: no request
    waits longer than the delay because of requests behind it. In a queue that is fair to clients the leading
    group, whose client has its turn, goes at once in this case. ``regroup`` gives the queue groups when the
    walk meets another merge key for the first time; without ``regroup`` another merge key closes the batch.

    A batch that an instance would only hold (``is_held``) must not be able to grow, so rule 3 does not apply.
    If a full group waits behind a leading group whose delay has expired, the leading group goes all the same.

    A batch that exceeded the memory of its device halves the limit of elements (``halve``). The limit doubles
    after ``_GROWTH_BATCHES`` attempts, up to the configured one.

    Taken requests stay here while they wait, so that a request is walked once, not once for each later
    arrival. Only a new request that stands before one of them, by its priority, restarts the walk. Rule 4
    implies that there is no best and the batch is not closed: the requests, the number of their rows and
    bytes and the shape of the padded row are the only state.
    """

    def __init__(
        self,
        max_batch_size: int,
        batching: BatchingSpec,
        by_age: bool,
        regroup: Callable[[int], ShapeGroups] | None = None,
    ) -> None:
        self.merges = batching.merge and max_batch_size > 0
        self._max_rows = max_batch_size
        self._max_nbytes = batching.max_batch_nbytes or sys.maxsize
        self._max_elements = self._configured_elements = batching.max_batch_elements
        #: The number of attempts until a lowered limit of elements doubles; 0 if none is lowered.
        self._until_growth = 0
        self._preferred = frozenset(batching.preferred_batch_sizes or (max_batch_size,))
        self._largest_preferred = max(self._preferred)
        #: If this many rows wait in total, a batch that cannot grow exists.
        self.full_rows = self._largest_preferred if self.merges else 1
        self._delay_s = batching.max_queue_delay_us / 1e6
        self._collected: list[QueuedRequest] = []
        self._rows = self._nbytes = 0
        self._padded = EMPTY_ROW
        self._by_age = by_age
        self._regroup = regroup

    def form(self, waiting: WaitingRequests, now: float, is_held: bool = False) -> list[QueuedRequest] | None:
        """Take the next batch off the queue, in which at least one request waits. None: not yet."""
        if not self.merges:
            first_queued(waiting)
            return [waiting.popleft()]
        if self._until_growth:
            self._count_towards_growth()
        if not self._by_age and self._collected:
            first = first_queued(waiting)
            # A newer request stands before these.
            if first is not None and first.lane < self._collected[-1].lane:
                self.dissolve(waiting)
        if isinstance(waiting, ShapeGroups):
            best, closed = self._walk_group(waiting)
        else:
            best, closed = self._walk(waiting)
            if waiting and self._regroup is not None and waiting[0].merge_key != self._collected[0].merge_key:
                self.dissolve(waiting)
                waiting = self._regroup(self._largest_preferred)
                best, closed = self._walk_group(waiting)
        # The same sum as in ready_at(): a difference could be rounded to the other side of the delay.
        oldest = self._collected[0] if self._by_age else min(self._collected, key=_ENQUEUED_AT)
        is_overdue = now >= oldest.enqueued_at + self._delay_s
        if best and (is_held or not is_overdue or not self._delay_s):
            return self._cut(best, waiting)
        if not (closed or (is_overdue and not is_held) or self._rows >= self._largest_preferred):
            groups = waiting if isinstance(waiting, ShapeGroups) else None
            if groups is None or (full := groups.full_behind(self._collected[0])) is None:
                return None
            if not (is_overdue or groups.in_turns):
                self.dissolve(waiting)
                best, _ = self._walk_group(groups, full)
                return self._cut(best or len(self._collected), waiting)
        return self._cut(len(self._collected), waiting)

    def halve(self, requests: Sequence[QueuedRequest]) -> None:
        """Lower the limit of elements to half of these requests, if the model has a limit."""
        padded = functools.reduce(PaddedRow.including, requests, EMPTY_ROW)
        elements = sum([one.rows for one in requests]) * padded.elements
        if self._max_elements and elements:
            self._max_elements = min(self._max_elements, max(1, elements // 2))
            self._until_growth = _GROWTH_BATCHES

    def _count_towards_growth(self) -> None:
        self._until_growth -= 1
        if not self._until_growth:
            self._max_elements = min(2 * self._max_elements, self._configured_elements)
            if self._max_elements < self._configured_elements:
                self._until_growth = _GROWTH_BATCHES

    def has_full(self, groups: GroupedRequests) -> bool:
        """Return whether a batch exists that may be held."""
        if self._collected and self._rows + groups.rows_of(self._collected[0].merge_key) >= self.full_rows:
            return True
        first = self.first(groups)
        return first is not None and groups.full_behind(first) is not None

    def n_groups(self, groups: GroupedRequests) -> int:
        """Return the number of groups in which requests wait, collected requests included."""
        apart = self._collected and not groups.rows_of(self._collected[0].merge_key)
        return groups.n_groups + bool(apart)

    def first(self, waiting: WaitingRequests) -> QueuedRequest | None:
        return self._collected[0] if self._collected else first_queued(waiting)

    def ready_at(self, waiting: WaitingRequests) -> float:
        """Return when the delay of the oldest request expires; infinity if no request waits."""
        if self._by_age or not self._collected:
            oldest = self.first(waiting)
        else:
            oldest = min(self._collected, key=_ENQUEUED_AT)
        return math.inf if oldest is None else oldest.enqueued_at + self._delay_s

    def dissolve(self, waiting: WaitingRequests) -> None:
        """Put taken requests back, because one of them may be about to leave the queue."""
        self._cut(0, waiting)

    def _walk_group(self, groups: ShapeGroups, group: ShapeGroup | None = None) -> tuple[int, bool]:
        """Walk the group of the collected requests, or else ``group``, or else the leading group."""
        if self._collected:
            group = groups.group(self._collected[0].merge_key)
        elif group is None:
            group = groups.next_group()
        if group is None:
            return 0, False
        n_places, rows = len(group.places), self._rows
        found = self._walk(group.places)
        groups.popped(group, n_places - len(group.places), self._rows - rows)
        return found

    def _walk(self, waiting: WaitingRequests) -> tuple[int, bool]:
        """Take requests; returns the number of the best size (0: none), and whether the batch is closed."""
        taken, rows, nbytes, best = self._collected, self._rows, self._nbytes, 0
        preferred, max_rows, max_elements = self._preferred, self._max_rows, self._max_elements
        padded, max_nbytes, closed = self._padded, self._max_nbytes, False
        while waiting:
            request = waiting[0]
            if request.state is not _QUEUED:
                waiting.popleft()
                continue
            total, total_nbytes = rows + request.rows, nbytes + request.nbytes
            if taken:
                if total > self._largest_preferred and not best:
                    best = len(taken)
                if total > max_rows or total_nbytes > max_nbytes or request.merge_key != taken[0].merge_key:
                    closed = True
                    break
            if max_elements:
                grown = padded.including(request)
                if taken and total * grown.elements > max_elements:
                    closed = True
                    break
                padded = grown
            taken.append(waiting.popleft())
            rows, nbytes = total, total_nbytes
            if rows in preferred:
                best = len(taken)
        self._rows, self._nbytes, self._padded = rows, nbytes, padded
        return best, closed

    def _cut(self, count: int, waiting: WaitingRequests) -> list[QueuedRequest]:
        """Return the first ``count`` taken requests, and put the others back to be walked again."""
        batch, self._collected = self._collected, []
        self._rows, self._nbytes, self._padded = 0, 0, EMPTY_ROW
        if count < len(batch):
            waiting.extendleft(reversed(batch[count:]))
            del batch[count:]
        return batch


#: The spare time that must be left while others wait: this part of a batch's duration, and at least this
#: time.
_SPARE: Final = 0.5
_LEAST_SPARE_S: Final = 1e-3


class Eviction:
    """Removes requests from one queue to make room for others. ``evicted`` requests still have to be
    answered.

    Requests without a deadline are not evicted for time. A request with a deadline is not begun if its batch
    is expected to end after the deadline (``ServiceTime``). Of the requests that can be in time, the oldest
    go first. Three rules limit the effect of an estimate:

    - while the duration of batches is unknown, all requests run;
    - no instance idles because of it: if no request that can be in time waits and an instance is free,
      requests that are probably late run. So the next batches correct an estimate that is too high;
    - a part of a batch's duration must be left as spare time only while more requests wait than fit into the
      batch: the answer has a way to go, and of two batches of the same size one takes longer.
    """

    def __init__(
        self, queue: RequestQueue, former: BatchFormer, service_time: ServiceTime, counts: RequestCounts
    ) -> None:
        self._queue = queue
        self._former = former
        self._service_time = service_time
        self._counts = counts
        self.evicted: list[QueuedRequest] = []

    def add_by_evicting(self, request: QueuedRequest, now: float) -> None:
        """Queue a request in place of one of a client with more; raise QueueFull if no client has more."""
        while (evictable_for := self._queue.evictable_for(request)) is not None:
            self._former.dissolve(self._queue.waiting)
            self._evict(evictable_for, RemovalReason.CROWDING)
        self._queue.add(request, now)

    def evict_hopeless(self, now: float) -> None:
        """While others wait, evict requests that would be late even if they began now and alone."""
        least_s, queue = self._service_time.estimate(1), self._queue
        if least_s is None:
            return
        while queue.requests > 1 and (hopeless := queue.first_late(now + least_s)) is not None:
            self._former.dissolve(self._queue.waiting)
            self._evict(hopeless, RemovalReason.HOPELESS)

    def in_time(
        self, requests: list[QueuedRequest], begins_at: float, now: float, is_held: bool
    ) -> list[QueuedRequest] | None:
        """Return the next batch without requests that cannot be in time, or None if no batch is ready.

        A batch that is held begins behind others.
        """
        queue = self._queue
        while late := self._late(requests, begins_at, 2 if is_held else 1):
            if len(late) == queue.requests and not is_held:
                break
            queue.waiting.extendleft(reversed(requests))
            for one in late:
                self._evict(one, RemovalReason.HOPELESS)
            again = self._former.form(queue.waiting, now, is_held) if queue.requests else None
            if again is None:
                return None
            requests = again
        return requests

    def _late(self, requests: list[QueuedRequest], begins_at: float, spares: int) -> list[QueuedRequest]:
        """Return the requests late if begun at ``begins_at``; ``spares``: batches that may take longer."""
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
