"""Fairness between the clients of one model: whose request is next, and who gives way where the queue is
full. Pure. A model without it needs only ``priority_queue.py``.

Within a lane clients take turns: deficit round robin by rows. A turn is worth a *quantum*, the rows of the
largest request that the lane has seen since it was empty, so that every turn lets at least one request go;
where all have one row, clients alternate. Who has nothing queued has no turn, no credit, and costs nothing.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Hashable, Iterator
from typing import Final

from gpuserve.front.queueing.priority_queue import PriorityQueue, waits
from gpuserve.front.queueing.queue import Lane, QueuedRequest
from gpuserve.model.spec import QueueSpec

_NBYTES: Final = operator.attrgetter("nbytes")


class _Turn:
    """A client in a lane: its requests, the next one first, and how many rows of them may go now."""

    __slots__ = ("client", "credit", "requests")

    def __init__(self, client: Hashable, credit: int) -> None:
        self.client = client
        self.credit = credit
        self.requests: deque[QueuedRequest] = deque()


class FairLane:
    """The requests of one lane, in turns of their clients. What was put back goes first: it had its turn."""

    def __init__(self, key: Lane) -> None:
        self._key = key
        #: Whose turn it is first; all of them have requests.
        self._turns: deque[_Turn] = deque()
        self._by_client: dict[Hashable, _Turn] = {}
        self._put_back: deque[QueuedRequest] = deque()
        self._quantum = 1

    def __bool__(self) -> bool:
        return bool(self._put_back or self._turns)

    def __getitem__(self, index: int, /) -> QueuedRequest:
        """The first request, where there is one; of no use for others than 0."""
        return self._put_back[0] if self._put_back else self._next_turn().requests[0]

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self._put_back
        for turn in self._turns:
            yield from turn.requests

    def append(self, request: QueuedRequest) -> None:
        self._quantum = max(self._quantum, request.rows)
        turn = self._by_client.get(request.client)
        if turn is None:
            turn = self._by_client[request.client] = _Turn(request.client, self._quantum)
            self._turns.append(turn)
        turn.requests.append(request)

    def appendleft(self, request: QueuedRequest) -> None:
        self._put_back.appendleft(request)

    def popleft(self) -> QueuedRequest:
        if self._put_back:
            return self._put_back.popleft()
        turn = self._next_turn()
        request = turn.requests.popleft()
        if waits(request, self._key):
            turn.credit -= request.rows
        if not turn.requests:
            self._turns.popleft()
            del self._by_client[turn.client]
        return request

    def _next_turn(self) -> _Turn:
        """The first of the turns, after all have passed whose credit is used up."""
        while True:
            turn = self._turns[0]
            request = turn.requests[0]
            if turn.credit >= request.rows or not waits(request, self._key):
                return turn
            turn.credit += self._quantum
            self._turns.rotate(-1)


class _Holding:
    """The requests of one client that wait, by their numbers, oldest first."""

    __slots__ = ("nbytes", "requests")

    def __init__(self) -> None:
        self.requests: OrderedDict[int, QueuedRequest] = OrderedDict()
        self.nbytes = 0

    @property
    def newest(self) -> QueuedRequest:
        return self.requests[next(reversed(self.requests))]


class Shares:
    """What each client has waiting. Who has the most requests is known at any time; who has the most bytes is
    looked for among those who have any.
    """

    def __init__(self) -> None:
        self._by_client: dict[Hashable, _Holding] = {}
        #: The clients that have so many requests.
        self._by_count: dict[int, dict[Hashable, None]] = {}
        self._most = 0

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def add(self, request: QueuedRequest, *, oldest: bool = False) -> None:
        holding = self._by_client.setdefault(request.client, _Holding())
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

    def crowding(self, client: Hashable) -> QueuedRequest | None:
        """The newest request of whoever has the most, where that is more than this client will have with one
        more.
        """
        mine = self._by_client.get(client)
        if self._most <= (len(mine.requests) if mine else 0) + 1:
            return None
        return self._by_client[next(iter(self._by_count[self._most]))].newest

    def crowding_nbytes(self, client: Hashable, nbytes: int, excess: int) -> QueuedRequest | None:
        """As ``crowding``, for a request of so many bytes where there are so many too many."""
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
    """What waits for a model that is fair to its clients."""

    def __init__(self, spec: QueueSpec) -> None:
        super().__init__(spec, FairLane)
        self._header = spec.fairness_header.encode()
        self._shares = Shares()
        #: Of the levels that have a limit of their own, where anybody waits.
        self._of_level: defaultdict[int, Shares] = defaultdict(Shares)

    def add(self, request: QueuedRequest, now: float) -> None:
        request.client = request.client_of(self._header)
        super().add(request, now)

    def crowding(self, request: QueuedRequest) -> QueuedRequest | None:
        level, client = self._level(request.priority), request.client
        found: list[QueuedRequest | None] = []
        most_of_level = self._policy_of(level).max_requests
        if most_of_level and self._requests[level] >= most_of_level:
            found.append(self._of_level[level].crowding(client))
        if self.requests >= self._max_requests:
            found.append(self._shares.crowding(client))
        excess = self.nbytes + request.nbytes - self._max_nbytes
        if excess > 0 and self.requests:
            found.append(self._shares.crowding_nbytes(client, request.nbytes, excess))
        return found[0] if found and all(found) else None

    def put_back(self, requests: Collection[QueuedRequest]) -> None:
        super().put_back(requests)
        for request in requests:  # they are not the newest
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

    def _shares_of(self, request: QueuedRequest) -> list[Shares]:
        level, _ = request.lane
        if self._policy_of(level).max_requests:
            return [self._shares, self._of_level[level]]
        return [self._shares]
