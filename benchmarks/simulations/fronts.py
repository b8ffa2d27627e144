"""Front processes before workers that run batches, as discrete events. Pure and seeded: no clock, no I/O.

A front is one CPU. It works in turns like an event loop: what has come in when a turn begins is read, the
ends of batches are answered (the next batch goes first), and batches for the slots that are free leave at
the end of the turn. A worker runs one batch at a time and holds others that were sent ahead, oldest first.

What is left out: limits of queues, deadlines, the network, the clients' CPU, and fronts that share cores.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from benchmarks.scenarios.arrivals import Schedule
from benchmarks.simulations.setting import LENDING, Deployment, Sharing

#: The part of a request's CPU time that is spent before it can be put into a batch.
_INTAKE: Final = 0.6
#: A turn reads no longer than this, or one request: large bodies come in pieces, between which others have
#: their turn.
_READ_S: Final = 1e-3


class Answered(NamedTuple):
    """A request, from its arrival to its answer, at a front."""

    arrived_at_s: float
    answered_at_s: float
    front: int


class Run(NamedTuple):
    """What happened: every request, the rows of every batch by the time at which it left its front, and the
    seconds that each front was busy.
    """

    answered: list[Answered]
    batches: list[tuple[float, int]]
    busy_s: list[float]


class _Message(NamedTuple):
    """To a front: a batch of this worker ended, or (None) it lends a slot."""

    at_s: float
    worker: int
    batch: Sequence[float] | None


class _Front:
    """``slots`` are the free ones at each worker, ``granted`` counts those that are lent and not used yet."""

    def __init__(self, index: int, slots: list[int]) -> None:
        self.index = index
        self.arrivals: list[float] = []
        self.read_at: list[float] = []  #: of those that were read; the first ``sent`` of them are in batches
        self.sent = 0
        self.slots = slots
        self.used = [0] * len(slots)
        self.inbox: deque[_Message] = deque()
        self.free_at = self.busy_s = 0.0
        self.next_turn_at = math.inf
        self.granted = self.asked = 0

    def waiting(self, now: float) -> int:
        """Requests that could go into a batch."""
        read = len(self.read_at)
        while read > self.sent and self.read_at[read - 1] > now:
            read -= 1
        return read - self.sent

    def due_at(self) -> float:
        """When there is something to do."""
        read = len(self.read_at)
        arrival = self.arrivals[read] if read < len(self.arrivals) else math.inf
        return max(self.free_at, min(arrival, self.inbox[0].at_s if self.inbox else math.inf))


class _Worker:
    """``lent`` slots have not come back with a batch yet; ``asked``: a front's question is on its way."""

    def __init__(self) -> None:
        self.held: deque[tuple[_Front, Sequence[float]]] = deque()
        self.running: tuple[_Front, Sequence[float]] | None = None
        self.lent = 0
        self.asked = False

    @property
    def taken(self) -> int:
        """Slots that are in use or lent."""
        return (self.running is not None) + len(self.held) + self.lent


class Simulation:
    """One run: the requests of ``schedule``, those of connection ``i`` at the front ``layout[i]``."""

    def __init__(self, what: Deployment, schedule: Schedule, layout: Sequence[int]) -> None:
        self._what, self._costs = what, what.costs
        self._lends = what.sharing in LENDING
        self._workers = [_Worker() for _ in range(what.workers)]
        self._fronts = [_Front(index, what.slots(index)) for index in range(what.fronts)]
        for at, connection in zip(schedule.at_s, schedule.connection, strict=True):
            self._fronts[layout[connection]].arrivals.append(at)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._answered: list[Answered] = []
        self._batches: list[tuple[float, int]] = []

    def run(self) -> Run:
        """Until every request is answered."""
        for front in self._fronts:
            self._wake(front)
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        return Run(self._answered, self._batches, [front.busy_s for front in self._fronts])

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    # ---- a front --------------------------------------------------------------------------

    def _wake(self, front: _Front) -> None:
        at = front.due_at()
        if at < front.next_turn_at:
            front.next_turn_at = at
            self._at(at, partial(self._turn, front))

    def _turn(self, front: _Front, now: float) -> None:
        if now != front.next_turn_at:
            return  # it was woken earlier than this was planned for, and has planned anew
        at = self._read(front, now)
        while front.inbox and front.inbox[0].at_s <= now:
            _, worker, batch = front.inbox.popleft()
            front.slots[worker] += batch is None or not self._lends
            if batch is None:
                at += self._costs.loan_s
            else:
                at = self._answer(front, batch, self._send(front, at))
        front.free_at = at = self._send(front, at)
        front.busy_s += at - now
        front.next_turn_at = math.inf
        if self._lends:
            self._at(at, partial(self._settle, front))
        self._wake(front)

    def _read(self, front: _Front, now: float) -> float:
        at, read = now, len(front.read_at)
        while read < len(front.arrivals) and front.arrivals[read] <= now and at < now + _READ_S:
            at += self._costs.request_s * _INTAKE
            front.read_at.append(at)
            read += 1
        return at

    def _send(self, front: _Front, at: float) -> float:
        """Batches for the slots that are free, to where most are; returns when they have left."""
        while front.sent < len(front.read_at) and any(front.slots):
            worker = max(range(len(front.slots)), key=lambda one: (front.slots[one], -front.used[one]))
            last = min(front.sent + self._what.model.max_rows, len(front.read_at))
            batch = front.arrivals[front.sent : last]
            front.sent, front.used[worker] = last, next(self._numbers)
            at += self._costs.batch_s
            self._batches.append((at, len(batch)))
            front.slots[worker] -= 1
            front.granted -= self._lends
            self._at(at + self._costs.hop_s, partial(self._take, front, worker, batch))
        return at

    def _answer(self, front: _Front, batch: Sequence[float], at: float) -> float:
        for arrived_at in batch:
            at += self._costs.request_s * (1 - _INTAKE)
            self._answered.append(Answered(arrived_at, at, front.index))
        return at

    def _settle(self, front: _Front, now: float) -> None:
        """For what waits, ask workers that stand still. No more is ever lent than is needed, since nobody
        cancels here.
        """
        batches = math.ceil(front.waiting(now) / self._what.model.max_rows)
        wanted = batches - front.granted - front.asked
        still = [index for index, one in enumerate(self._workers) if not one.taken and not one.asked]
        for index in still[: max(0, wanted)]:
            front.asked += 1
            self._workers[index].asked = True
            self._at(now + self._costs.hop_s, partial(self._asked, front, index))

    # ---- a worker -------------------------------------------------------------------------

    def _take(self, front: _Front, index: int, batch: Sequence[float], now: float) -> None:
        worker = self._workers[index]
        worker.lent -= self._lends
        worker.held.append((front, batch))
        if worker.running is None:
            self._next(index, now)

    def _end(self, index: int, now: float) -> None:
        worker = self._workers[index]
        assert worker.running is not None
        front, batch = worker.running
        worker.running = None
        self._tell(front, _Message(now + self._costs.hop_s, index, batch))
        self._next(index, now)

    def _next(self, index: int, now: float) -> None:
        """Between two batches: begin the next one, and lend the slots that there are."""
        worker = self._workers[index]
        if worker.held:
            worker.running = worker.held.popleft()
            self._at(now + self._costs.worker_s + self._what.model.batch_s, partial(self._end, index))
        if self._lends:
            self._lend(index, now)

    def _lend(self, index: int, now: float) -> None:
        worker = self._workers[index]
        while worker.taken <= self._what.prefetch:
            front = self._neediest(now)
            if front is None:
                return
            worker.lent += 1
            front.granted += 1
            self._tell(front, _Message(now + self._costs.hop_s, index, None))

    def _neediest(self, now: float) -> _Front | None:
        """Of the fronts with more requests than the slots lent to them take, the one that gets the next."""
        covered = {one: one.granted * self._what.model.max_rows for one in self._fronts}
        needy = [one for one in self._fronts if one.waiting(now) > covered[one]]
        if self._what.sharing is Sharing.LENT_TO_MOST:
            return max(needy, key=lambda one: one.waiting(now) - covered[one], default=None)
        return min(needy, key=lambda one: one.arrivals[one.sent + covered[one]], default=None)

    def _asked(self, front: _Front, index: int, now: float) -> None:
        worker = self._workers[index]
        front.asked -= 1
        worker.asked = False
        if not worker.taken:
            self._lend(index, now)
        self._settle(front, now)  # where somebody else was faster, another worker is asked

    def _tell(self, front: _Front, message: _Message) -> None:
        front.inbox.append(message)
        self._wake(front)
