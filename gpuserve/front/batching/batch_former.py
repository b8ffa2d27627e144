"""Which of the requests that wait go into the next batch, and when: the rules of Triton's dynamic batcher.
Pure. What waits, and where it runs, is the business of whoever asks: ``model_scheduler.py`` for a model's
queue, ``sequence_strategies.py`` for sequences.
"""

from __future__ import annotations

import math
import operator
from typing import Final

from gpuserve.front.queueing.queue import QueuedRequest, RequestState, WaitingRequests, first_queued
from gpuserve.model.spec import BatchingSpec

# Looked at once a request: a look-up on an Enum class costs ten times one of a global.
_QUEUED: Final = RequestState.QUEUED
_ENQUEUED_AT: Final = operator.attrgetter("enqueued_at")


def full_batch_rows(max_batch_size: int, batching: BatchingSpec) -> int:
    """The rows of a batch where more than enough of one row each wait; 0: every request is a batch itself."""
    if not batching.merge or max_batch_size == 0:
        return 0
    if batching.max_queue_delay_us == 0:
        return max(batching.preferred_batch_sizes, default=max_batch_size)
    return max_batch_size


class BatchFormer:
    """Which requests at the head of the queue make the next batch, or whether to wait for more.

    Requests are walked in the order in which they wait, whatever their priorities, and taken until the batch
    is *closed*, because the next one would exceed ``max_batch_size`` or has another merge key, or the queue
    ends. *best* is the largest preferred size that the walk hit, or else all that came before the request
    that went over the largest preferred size. Then, with the age of the oldest request taken:

    1. best, and the delay has not run out: send exactly best.
    2. closed, or at least the largest preferred size: send all that was taken.
    3. the delay has run out, or there is none: send all that was taken.
    4. wait.

    Without preferred sizes, ``max_batch_size`` is the one. A model that does not merge sends every request
    by itself, at once. ``by_age`` says that the first request that waits is always the oldest.

    What was taken stays here while it waits, so that an arrival is walked once, not once for each later one.
    Only one that stands before any of it, by its priority, makes the walk begin anew.
    Rule 4 leaves no best behind and nothing closed: the requests and their rows are all there is to keep.
    """

    def __init__(self, max_batch_size: int, batching: BatchingSpec, by_age: bool) -> None:
        self.merges = batching.merge and max_batch_size > 0
        self._max_rows = max_batch_size
        self._preferred = frozenset(batching.preferred_batch_sizes or (max_batch_size,))
        self._largest_preferred = max(self._preferred)
        #: Where so many rows wait in all, there is a batch that cannot grow.
        self.full_rows = self._largest_preferred if self.merges else 1
        self._delay_s = batching.max_queue_delay_us / 1e6
        self._taken: list[QueuedRequest] = []
        self._rows = 0
        self._by_age = by_age

    def form(self, waiting: WaitingRequests, now: float) -> list[QueuedRequest] | None:
        """Take the next batch off the queue, where at least one request waits; None: not yet."""
        if not self.merges:
            first_queued(waiting)
            return [waiting.popleft()]
        if not self._by_age and self._taken:
            self._make_way(waiting)
        best, closed = self._walk(waiting)
        # The same sum as in ready_at(): a difference could round to the other side of the delay.
        oldest = self._taken[0] if self._by_age else min(self._taken, key=_ENQUEUED_AT)
        overdue = now >= oldest.enqueued_at + self._delay_s
        if best and not (overdue and self._delay_s > 0):
            return self._cut(best, waiting)
        if closed or overdue or self._rows >= self._largest_preferred:
            batch, self._taken, self._rows = self._taken, [], 0
            return batch
        return None

    def first(self, waiting: WaitingRequests) -> QueuedRequest | None:
        return self._taken[0] if self._taken else first_queued(waiting)

    def ready_at(self, waiting: WaitingRequests) -> float:
        """When the delay of the oldest request runs out; infinity where none waits."""
        if self._by_age or not self._taken:
            oldest = self.first(waiting)
        else:
            oldest = min(self._taken, key=_ENQUEUED_AT)
        return math.inf if oldest is None else oldest.enqueued_at + self._delay_s

    def dissolve(self, waiting: WaitingRequests) -> None:
        """Put back what was taken, because one of it may be about to leave the queue."""
        self._cut(0, waiting)

    def _make_way(self, waiting: WaitingRequests) -> None:
        """Put back what was taken if a request that came since stands before any of it."""
        first = first_queued(waiting)
        if first is not None and first.lane < self._taken[-1].lane:
            self.dissolve(waiting)

    def _walk(self, waiting: WaitingRequests) -> tuple[int, bool]:
        """Take requests: how many of them are the best size (0: none was hit), and whether it is closed."""
        taken, rows, best = self._taken, self._rows, 0
        preferred, max_rows = self._preferred, self._max_rows
        while waiting:
            request = waiting[0]
            if request.state is not _QUEUED:
                waiting.popleft()
                continue
            total = rows + request.rows
            if taken:
                if total > self._largest_preferred and not best:
                    best = len(taken)
                if total > max_rows or request.merge_key != taken[0].merge_key:
                    self._rows = rows
                    return best, True
            taken.append(waiting.popleft())
            rows = total
            if rows in preferred:
                best = len(taken)
        self._rows = rows
        return best, False

    def _cut(self, count: int, waiting: WaitingRequests) -> list[QueuedRequest]:
        """The first ``count`` requests taken; the others go back, to be walked afresh."""
        batch, self._taken, self._rows = self._taken, [], 0
        if count < len(batch):
            waiting.extendleft(reversed(batch[count:]))
            del batch[count:]
        return batch
