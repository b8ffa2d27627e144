"""Which of the sequences that are ready at an instance go into its next batch, one request of each, and when.
Pure, and without memory: it is asked again whenever something may have changed. How the sequences came to
that instance is in ``sequence_scheduler.py``.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection
from typing import Final, Protocol

from gpuserve.front.batching.batch_former import BatchFormer
from gpuserve.front.batching.sequence_state import ActiveSequence
from gpuserve.front.queueing.queue import QueuedRequest
from gpuserve.model.spec import DIRECT, BatchingSpec, SequenceBatching

_SEAT: Final = operator.attrgetter("seat")
_ACCEPTED: Final = operator.attrgetter("sequence")


class SequenceStrategy(Protocol):
    """How one batch of sequences is chosen. At least one sequence is ready."""

    def form(self, ready: Collection[ActiveSequence], now: float) -> list[QueuedRequest] | None:
        """The next requests that go together now; None: not yet."""

    def ready_at(self, ready: Collection[ActiveSequence]) -> float:
        """When they go at the latest, though nothing else happens."""


def strategy_of(sequence: SequenceBatching, batching: BatchingSpec, max_batch_size: int) -> SequenceStrategy:
    if sequence.strategy == DIRECT:
        least = sequence.minimum_slot_utilization * max(1, max_batch_size)
        return DirectStrategy(batching.max_queue_delay_us / 1e6, least, merges=batching.merge)
    return OldestStrategy(max_batch_size, batching)


class DirectStrategy:
    """Every sequence that is ready, by its seat. While fewer than ``least`` are, the oldest may wait."""

    def __init__(self, delay_s: float, least: float, *, merges: bool) -> None:
        self._delay_s = delay_s
        self._least = least
        self._merges = merges

    def form(self, ready: Collection[ActiveSequence], now: float) -> list[QueuedRequest] | None:
        if now < self.ready_at(ready):
            return None
        oldest = _oldest(ready)
        if not self._merges:
            return [oldest]
        heads = [sequence.waiting[0] for sequence in sorted(ready, key=_SEAT)]
        return [one for one in heads if one.merge_key == oldest.merge_key]

    def ready_at(self, ready: Collection[ActiveSequence]) -> float:
        enqueued_at = _oldest(ready).enqueued_at
        return enqueued_at + self._delay_s if len(ready) < self._least else enqueued_at


class OldestStrategy:
    """The requests that the dynamic batcher would take if these were all that wait."""

    def __init__(self, max_batch_size: int, batching: BatchingSpec) -> None:
        self._former = BatchFormer(max_batch_size, batching, by_age=True)

    def form(self, ready: Collection[ActiveSequence], now: float) -> list[QueuedRequest] | None:
        waiting = _heads(ready)
        requests = self._former.form(waiting, now)
        if requests is None:
            self._former.dissolve(waiting)
        return requests

    def ready_at(self, ready: Collection[ActiveSequence]) -> float:
        return self._former.ready_at(_heads(ready))


def _oldest(ready: Collection[ActiveSequence]) -> QueuedRequest:
    return min([sequence.waiting[0] for sequence in ready], key=_ACCEPTED)


def _heads(ready: Collection[ActiveSequence]) -> deque[QueuedRequest]:
    return deque(sorted([sequence.waiting[0] for sequence in ready], key=_ACCEPTED))
