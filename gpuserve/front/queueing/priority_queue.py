"""Priorities and queue policies: which request stands before which, how long it may wait, and what
becomes of it then. A model that has neither needs only ``queue.py``.

Pure, like all of the batcher. The order in which requests are taken::

    level 1, in time ► level 1, delayed ► level 2, in time ► level 2, delayed ► … ► level n, delayed

Each of these lanes is in order of arrival; a request changes its lane once at most, when its policy delays
it. Those whose worker died come before all of them (``RequestQueue.retried``), and have no policy's time
any more: it is for waiting, and they have waited.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar, Final

from gpuserve.core.errors import QueueFull
from gpuserve.front.queueing.queue import (
    Deadlines,
    Lane,
    QueuedRequest,
    RemovalReason,
    RequestQueue,
    RequestState,
)
from gpuserve.model.spec import PolicySpec, QueueSpec

DELAY: Final = "delay"
_QUEUED: Final = RequestState.QUEUED


class Lanes:
    """``WaitingRequests`` by lane. A place that a delayed or removed request leaves is dropped before anybody
    sees it as the first. ``new_lane`` makes what holds the places of one lane, which is like a deque.
    """

    def __init__(self, new_lane: Callable[[Lane], Any]) -> None:
        self._new_lane = new_lane
        self._lanes: dict[Lane, Any] = {}
        #: The lanes' keys, as a heap.
        self._order: list[Lane] = []
        self._places = 0

    def __len__(self) -> int:
        return self._places

    def __bool__(self) -> bool:
        while self._order:
            key = self._order[0]
            lane = self._lanes[key]
            while lane:
                if waits(lane[0], key):
                    return True
                lane.popleft()
                self._places -= 1
            del self._lanes[heapq.heappop(self._order)]
        return False

    def __getitem__(self, index: int, /) -> QueuedRequest:
        """The first request, where there is one; of no use for others than 0."""
        first: QueuedRequest = self._lanes[self._order[0]][index]
        return first

    def __iter__(self) -> Iterator[QueuedRequest]:
        for key in sorted(self._lanes):
            yield from [one for one in self._lanes[key] if waits(one, key)]

    def popleft(self) -> QueuedRequest:
        self._places -= 1
        first: QueuedRequest = self._lanes[self._order[0]].popleft()
        return first

    def append(self, request: QueuedRequest) -> None:
        self._places += 1
        self._lane(request.lane).append(request)

    def extendleft(self, requests: Iterable[QueuedRequest]) -> None:
        for request in requests:
            self._places += 1
            self._lane(request.lane).appendleft(request)

    def _lane(self, key: Lane) -> Any:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._new_lane(key)
            heapq.heappush(self._order, key)
        return lane


def waits(request: QueuedRequest, lane: Lane) -> bool:
    """Whether a place in a lane is that of a request that waits there."""
    return request.state is _QUEUED and request.lane == lane


def _by_arrival(_: Lane) -> deque[QueuedRequest]:
    return deque()


class PriorityQueue(RequestQueue):
    """What waits for a model whose requests differ in priority, or may not wait for ever."""

    by_age: ClassVar[bool] = False

    def __init__(self, spec: QueueSpec, new_lane: Callable[[Lane], Any] = _by_arrival) -> None:
        super().__init__(spec, Lanes(new_lane))
        self._new_lane = new_lane
        self._levels = spec.priority_levels
        self._default_level = spec.default_priority
        self._policy = spec.policy
        self._policies = dict(spec.policies)
        #: How many requests of each level wait; only levels at which any does.
        self._requests: Counter[int] = Counter()
        self._timeouts = Deadlines()

    def add(self, request: QueuedRequest, now: float) -> None:
        level = self._level(request.priority)
        policy = self._policy_of(level)
        if policy.max_requests and self._requests[level] >= policy.max_requests:
            of_level = f" of priority {level}" if self._levels else ""
            raise QueueFull(f"Exceeds maximum queue size of {policy.max_requests} requests{of_level}")
        if request.state is RequestState.NEW:
            request.lane = (level, False)
            request.timeout_at = None
        super().add(request, now)
        has_own = request.timeout_s is not None
        timeout_s = _timeout_s(policy, request)
        if timeout_s is not None:
            request.timeout_at = now + timeout_s
            self._watch(self._timeouts, request, request.timeout_at)
            if has_own and request.timeout_s is None and request.deadline is not None:  # now the policy's
                self._deadlines.discard(request)
                request.deadline = None

    def put_back(self, requests: Collection[QueuedRequest]) -> None:
        for request in requests:
            request.timeout_at = None
        super().put_back(requests)

    def first_due(self, now: float) -> QueuedRequest | None:
        if self.next_due() > now:
            return None
        return self._deadlines.first_due(now) or self._timeouts.first_due(now)

    def next_due(self) -> float:
        if self.due_from < math.inf:
            self.due_from = min(self._deadlines.nearest(), self._timeouts.nearest())
        return self.due_from

    def expire(self, request: QueuedRequest, now: float) -> bool:
        """Take a request that is due out; one that its policy delays goes to the end of its level instead."""
        level, _ = request.lane
        is_late = request.deadline is not None and request.deadline <= now
        if is_late or self._policy_of(level).timeout_action != DELAY:
            super().expire(request, now)
            if not is_late:
                request.removal_reason = RemovalReason.WAITED
            return True
        self._timeouts.discard(request)
        request.timeout_at = None
        request.lane = (level, True)
        self.waiting.append(request)
        return False

    def isolate(self, requests: Collection[QueuedRequest]) -> None:
        for request in requests:
            if self._policy_of(request.lane[0]).timeout_action == DELAY and request.timeout_at is not None:
                self._timeouts.discard(request)  # they are delayed behind all others already
                request.timeout_at = None
        super().isolate(requests)

    def _sweep(self, without: Collection[QueuedRequest] = ()) -> None:
        super()._sweep(without)
        waiting, self.waiting = self.waiting, Lanes(self._new_lane)
        for request in waiting:
            self.waiting.append(request)

    def _level(self, priority: int) -> int:
        return priority if 0 < priority <= self._levels else self._default_level

    def _policy_of(self, level: int) -> PolicySpec:
        return self._policies.get(level, self._policy)

    def _count(self, request: QueuedRequest) -> None:
        super()._count(request)
        self._requests[request.lane[0]] += 1

    def _uncount(self, requests: Collection[QueuedRequest]) -> int:
        for request in requests:
            level, _ = request.lane
            self._requests[level] -= 1
            if not self._requests[level]:
                del self._requests[level]
            if request.timeout_at is not None:
                self._timeouts.discard(request)
        return super()._uncount(requests)


def _timeout_s(policy: PolicySpec, request: QueuedRequest) -> float | None:
    """How long the request may wait; None: for ever. Its own limit can only shorten the policy's."""
    if not policy.default_timeout_us:
        return None
    timeout_s = policy.default_timeout_us / 1e6
    if policy.allow_timeout_override and request.timeout_s is not None and request.timeout_s < timeout_s:
        timeout_s, request.timeout_s = request.timeout_s, None
    return timeout_s
