"""Queues with priorities, queue policies and fairness between clients, and the choice of a model's queue.

A model without priorities, policies and fairness uses ``RequestQueue`` of ``request_queue.py``. Pure. The
order of service::

    level 1, in time ► level 1, delayed ► level 2, in time ► level 2, delayed ► … ► level n, delayed

Each of these lanes is in order of arrival. A request changes its lane at most once, when its policy delays
it. Requests whose worker died come before all lanes (``RequestQueue.retried``). Their policy's timeout no
longer applies, because the timeout limits waiting, and they have waited.

With fairness, clients take turns within a lane: deficit round robin by rows. A turn is worth a *quantum*, the
rows of the largest request that the lane has seen since it was empty, so every turn serves at least one
request. If all requests have one row, clients alternate. A client without queued requests has no turn, no
credit, and costs nothing. While requests of several shapes wait, a turn is a batch (``FairShapeGroups``).
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, ClassVar, Final

from gpuserve.core.errors import QueueFull
from gpuserve.front.scheduling.request_queue import (
    Deadlines,
    Lane,
    QueuedRequest,
    RemovalReason,
    RequestQueue,
    RequestState,
    WaitingRequests,
)
from gpuserve.front.scheduling.shape_groups import FairShapeGroups
from gpuserve.model.spec import CLIENT, PolicySpec, QueueSpec

DELAY: Final = "delay"
_QUEUED: Final = RequestState.QUEUED


class PriorityLanes:
    """``WaitingRequests`` by lane. ``new_lane`` makes the deque-like container of one lane.

    The place that a delayed or removed request leaves is dropped before a caller sees the request as the
    first.
    """

    def __init__(self, new_lane: Callable[[Lane], Any]) -> None:
        self._new_lane = new_lane
        self._lanes: dict[Lane, Any] = {}
        #: A heap of the keys of the lanes.
        self._order: list[Lane] = []
        self._places = 0

    def __len__(self) -> int:
        return self._places

    def __bool__(self) -> bool:
        while self._order:
            key = self._order[0]
            lane = self._lanes[key]
            while lane:
                if is_waiting_in(lane[0], key):
                    return True
                lane.popleft()
                self._places -= 1
            del self._lanes[heapq.heappop(self._order)]
        return False

    def __getitem__(self, index: int, /) -> QueuedRequest:
        """Return the first request. Requires a non-empty collection; only index 0 is valid."""
        first: QueuedRequest = self._lanes[self._order[0]][index]
        return first

    def __iter__(self) -> Iterator[QueuedRequest]:
        for key in sorted(self._lanes):
            yield from [one for one in self._lanes[key] if is_waiting_in(one, key)]

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

    def promote(self, request: QueuedRequest) -> None:
        """Let a waiting request that is the oldest of its client go first in its lane, a ``FairLane``."""
        self._places -= self._lanes[request.lane].promote(request)

    def _lane(self, key: Lane) -> Any:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._new_lane(key)
            heapq.heappush(self._order, key)
        return lane


def is_waiting_in(request: QueuedRequest, lane: Lane) -> bool:
    """Return whether a request waits in a lane, so that its place there is current."""
    return request.state is _QUEUED and request.lane == lane


class PriorityQueue(RequestQueue):
    """The queue of a model whose requests have priorities, or a limited time to wait."""

    by_age: ClassVar[bool] = False

    def __init__(self, spec: QueueSpec, new_lane: Callable[[Lane], Any] = lambda _: deque()) -> None:
        super().__init__(spec, PriorityLanes(new_lane))
        self._new_lane = new_lane
        self._levels = spec.priority_levels
        self._default_level = spec.default_priority
        self._policy = spec.policy
        self._policies = dict(spec.policies)
        #: The number of waiting requests of each level that has any.
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
            self._add_deadline(self._timeouts, request, request.timeout_at)
            # If the policy took the request's own timeout over, only the policy's timeout applies.
            if has_own and request.timeout_s is None and request.deadline is not None:
                self._deadlines.discard(request)
                request.deadline = None

    def requeue(self, requests: Collection[QueuedRequest]) -> None:
        for request in requests:
            request.timeout_at = None
        super().requeue(requests)

    def put_back(self, request: QueuedRequest) -> None:
        super().put_back(request)
        if request.timeout_at is not None:
            self._add_deadline(self._timeouts, request, request.timeout_at)

    def first_due(self, now: float) -> QueuedRequest | None:
        if self.next_due() > now:
            return None
        return self._deadlines.first_due(now) or self._timeouts.first_due(now)

    def next_due(self) -> float:
        if self.due_from < math.inf:
            self.due_from = min(self._deadlines.nearest(), self._timeouts.nearest())
        return self.due_from

    def expire(self, request: QueuedRequest, now: float) -> bool:
        """Remove a request that is due, or move it to the end of its level if its policy delays it."""
        level, _ = request.lane
        is_late = request.deadline is not None and request.deadline <= now
        if is_late or self._policy_of(level).timeout_action != DELAY:
            super().expire(request, now)
            if not is_late:
                request.removal_reason = RemovalReason.WAITED
            return True
        self._timeouts.discard(request)
        request.timeout_at = None
        if self.groups is not None:
            self.groups.discard(request)
        request.lane = (level, True)
        self.waiting.append(request)
        return False

    def isolate(self, requests: Collection[QueuedRequest]) -> None:
        for request in requests:
            if self._policy_of(request.lane[0]).timeout_action == DELAY and request.timeout_at is not None:
                self._timeouts.discard(request)  # isolated requests are behind all others already
                request.timeout_at = None
        super().isolate(requests)

    def _sweep(self, without: Collection[QueuedRequest] = ()) -> None:
        super()._sweep(without)
        if self.groups is None:
            waiting, self.waiting = self.waiting, self.new_places()
            for request in waiting:
                self.waiting.append(request)

    def new_places(self) -> WaitingRequests:
        return PriorityLanes(self._new_lane)

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
    """Return how long the request may wait; None for ever. Its own limit can only shorten the policy's."""
    if not policy.default_timeout_us:
        return None
    timeout_s = policy.default_timeout_us / 1e6
    if policy.allow_timeout_override and request.timeout_s is not None and request.timeout_s < timeout_s:
        timeout_s, request.timeout_s = request.timeout_s, None
    return timeout_s


_NBYTES: Final = operator.attrgetter("nbytes")


class _ClientTurn:
    """A client in a lane: its requests, the next one first, and the rows that it may still send this turn."""

    __slots__ = ("client", "credit", "requests")

    def __init__(self, client: Hashable, credit: int) -> None:
        self.client = client
        self.credit = credit
        self.requests: deque[QueuedRequest] = deque()


class FairLane:
    """The requests of one lane, served in turns of their clients. Requests that were put back go first."""

    def __init__(self, key: Lane) -> None:
        self._key = key
        #: The clients that have requests, in the order of their turns.
        self._turns: OrderedDict[Hashable, _ClientTurn] = OrderedDict()
        #: Requests that go before all turns, by their sequence numbers. Their clients have paid for them.
        self._requeued: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._quantum = 1

    def __bool__(self) -> bool:
        return bool(self._requeued or self._turns)

    def __getitem__(self, index: int, /) -> QueuedRequest:
        """Return the first request. Requires a non-empty lane; only index 0 is valid."""
        return next(iter(self._requeued.values())) if self._requeued else self._next_turn().requests[0]

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self._requeued.values()
        for turn in self._turns.values():
            yield from turn.requests

    def append(self, request: QueuedRequest) -> None:
        self._quantum = max(self._quantum, request.rows)
        turn = self._turns.get(request.client)
        if turn is None:
            turn = self._turns[request.client] = _ClientTurn(request.client, self._quantum)
        turn.requests.append(request)

    def appendleft(self, request: QueuedRequest) -> None:
        self._requeued[request.sequence] = request
        self._requeued.move_to_end(request.sequence, last=False)

    def promote(self, request: QueuedRequest) -> int:
        """Let a waiting request go before all turns, at the expense of its client, whose oldest one it is.
        Returns how many places of removed requests were dropped.
        """
        dropped = 0
        if request.sequence not in self._requeued:
            turn = self._turns[request.client]
            while turn.requests.popleft() is not request:
                dropped += 1
            turn.credit -= request.rows
            if not turn.requests:
                del self._turns[request.client]
        self.appendleft(request)
        return dropped

    def popleft(self) -> QueuedRequest:
        if self._requeued:
            _, request = self._requeued.popitem(last=False)
            turn = self._turns.get(request.client)
            if turn is not None and not is_waiting_in(request, self._key):
                turn.credit = min(turn.credit + request.rows, 2 * self._quantum)
            return request
        turn = self._next_turn()
        request = turn.requests.popleft()
        if is_waiting_in(request, self._key):
            turn.credit -= request.rows
        if not turn.requests:
            del self._turns[turn.client]
        return request

    def _next_turn(self) -> _ClientTurn:
        """Return the client whose turn it is, after rotating past the clients that have used their credit."""
        while True:
            turn = next(iter(self._turns.values()))
            request = turn.requests[0]
            if turn.credit >= request.rows or not is_waiting_in(request, self._key):
                return turn
            turn.credit += self._quantum
            self._turns.move_to_end(turn.client)


class _ClientShare:
    """The waiting requests of one client, by their sequence numbers, oldest first."""

    __slots__ = ("nbytes", "requests")

    def __init__(self) -> None:
        self.requests: OrderedDict[int, QueuedRequest] = OrderedDict()
        self.nbytes = 0

    @property
    def newest(self) -> QueuedRequest:
        return self.requests[next(reversed(self.requests))]


class ClientShares:
    """The waiting requests of each client. The client with the most requests is known at any time; the client
    with the most bytes is searched for among those that have requests waiting.
    """

    def __init__(self) -> None:
        self._by_client: dict[Hashable, _ClientShare] = {}
        #: The clients by their number of waiting requests.
        self._by_count: dict[int, dict[Hashable, None]] = {}
        self._most = 0

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def add(self, request: QueuedRequest, *, oldest: bool = False) -> None:
        holding = self._by_client.setdefault(request.client, _ClientShare())
        holding.requests[request.sequence] = request
        if oldest:
            holding.requests.move_to_end(request.sequence, last=False)
        holding.nbytes += request.nbytes
        count = len(holding.requests)
        self._move(request.client, count - 1, count)

    def discard(self, request: QueuedRequest) -> None:
        holding = self._by_client[request.client]
        del holding.requests[request.sequence]
        holding.nbytes -= request.nbytes
        count = len(holding.requests)
        if not count:
            del self._by_client[request.client]
        self._move(request.client, count + 1, count)

    def evictable_for(self, client: Hashable) -> QueuedRequest | None:
        """Return the newest request of the largest client, if above ``client`` with one more."""
        mine = self._by_client.get(client)
        if self._most <= (len(mine.requests) if mine else 0) + 1:
            return None
        return self._by_client[next(iter(self._by_count[self._most]))].newest

    def evictable_for_nbytes(self, client: Hashable, nbytes: int, excess: int) -> QueuedRequest | None:
        """Return the newest request of the client that has the most bytes, for a request of ``nbytes`` bytes
        that exceeds the limit by ``excess`` bytes. None if that client would not have more than ``client``.
        """
        mine = self._by_client.get(client)
        most = max(self._by_client.values(), key=_NBYTES)
        return most.newest if most.nbytes - excess >= (mine.nbytes if mine else 0) + nbytes else None

    def _move(self, client: Hashable, was: int, now: int) -> None:
        if was:
            del self._by_count[was][client]
            if not self._by_count[was]:
                del self._by_count[was]
        if now:
            self._by_count.setdefault(now, {})[client] = None
        if now > self._most or (was == self._most and was not in self._by_count):
            self._most = now


class FairQueue(PriorityQueue):
    """The queue of a model that is fair to its clients."""

    def __init__(self, spec: QueueSpec) -> None:
        super().__init__(spec, FairLane)
        self._header = spec.fairness_header.encode()
        self._shares = ClientShares()
        #: The shares at each level that has a limit of its own and waiting requests.
        self._of_level: defaultdict[int, ClientShares] = defaultdict(ClientShares)

    def add(self, request: QueuedRequest, now: float) -> None:
        request.client = request.client_of(self._header)
        super().add(request, now)

    def mark_dispatched(self, requests: Collection[QueuedRequest]) -> int:
        if isinstance(self.groups, FairShapeGroups):
            self.groups.end_turns(requests)
        return super().mark_dispatched(requests)

    def evictable_for(self, request: QueuedRequest) -> QueuedRequest | None:
        level, client = self._level(request.priority), request.client
        found: list[QueuedRequest | None] = []
        most_of_level = self._policy_of(level).max_requests
        if most_of_level and self._requests[level] >= most_of_level:
            found.append(self._of_level[level].evictable_for(client))
        if self.requests >= self._max_requests:
            found.append(self._shares.evictable_for(client))
        excess = self.nbytes + request.nbytes - self._max_nbytes
        if excess > 0 and self.requests:
            found.append(self._shares.evictable_for_nbytes(client, request.nbytes, excess))
        return found[0] if found and all(found) else None

    def requeue(self, requests: Collection[QueuedRequest]) -> None:
        super().requeue(requests)
        for request in requests:  # which are not the newest
            for shares in self._shares_of(request):
                shares.discard(request)
                shares.add(request, oldest=True)

    def _count(self, request: QueuedRequest) -> None:
        super()._count(request)
        for shares in self._shares_of(request):
            shares.add(request)

    def _uncount(self, requests: Collection[QueuedRequest]) -> int:
        for request in requests:
            for shares in self._shares_of(request):
                shares.discard(request)
            level, _ = request.lane
            if level in self._of_level and not self._of_level[level]:
                del self._of_level[level]
        return super()._uncount(requests)

    def _shares_of(self, request: QueuedRequest) -> list[ClientShares]:
        level, _ = request.lane
        if self._policy_of(level).max_requests:
            return [self._shares, self._of_level[level]]
        return [self._shares]


def make_request_queue(spec: QueueSpec) -> RequestQueue:
    """Return the queue of a model: with lanes only for priorities, policies or fairness."""
    if spec.fairness == CLIENT:
        return FairQueue(spec)
    if spec.priority_levels == 0 and spec.policy == PolicySpec():
        return RequestQueue(spec)
    return PriorityQueue(spec)
