"""The requests that wait for one model: their states, the queue's limits, and their deadlines.

Pure like all of this folder: ``now`` is an argument, in seconds of any one monotonic clock. Which requests
share a batch is decided in ``front/batching``; priorities and queue policies are in ``priority_queue.py``.

A request's life::

    NEW ──submit──► QUEUED ──dispatch──► RUNNING ──complete, lose──► FINISHED
                      ▲ │                   │                           ▲
                      │ └──cancel, expire───┼───────────────────────────┘
                      └───────retry─────────┘

Nothing is ever searched for in a queue. A request that is cancelled or expires changes its state and
leaves the counts at once; its place is skipped when it comes to the front, and all such places are
swept as soon as they outnumber the requests that wait: O(1) a request, amortised.
"""

from __future__ import annotations

import enum
import heapq
import math
import operator
import sys
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Literal, Protocol, TypeAlias

from gpuserve.core.errors import DeadlineExceeded, QueueFull
from gpuserve.core.states import IllegalTransition
from gpuserve.model.spec import QueueSpec

if TYPE_CHECKING:
    from gpuserve.front.requests.inference import Sequence

#: How many stale entries the deadlines may hold before it is worth sorting them out.
_STALE_ALLOWED: Final = 64


class RequestState(enum.Enum):
    """What a request is doing. Only ``FINISHED`` is final."""

    NEW = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class RemovalReason(enum.Enum):
    """Why a request was taken out of the queue, by nobody's wish."""

    LATE = "its time ran out"
    HOPELESS = "it could not have ended in time"
    WAITED = "its queue policy lets it wait no longer"
    CROWDING = "the queue was full, and its client had the most in it"
    ISOLATED = "its worker died, and its client's requests had killed workers before"
    LATE_IN_BACKLOG = "its time ran out before its sequence had a slot"
    CANCELLED = "another request of its sequence was given up"


#: A level of priority, 1 first, and whether its time ran out there; the lesser goes first.
Lane: TypeAlias = tuple[int, bool]

RequestEvent: TypeAlias = Literal["submit", "dispatch", "cancel", "expire", "complete", "retry", "lose"]

#: event -> (the only state in which it may happen, the state it leads to)
TRANSITIONS: Final[dict[RequestEvent, tuple[RequestState, RequestState]]] = {
    "submit": (RequestState.NEW, RequestState.QUEUED),
    "dispatch": (RequestState.QUEUED, RequestState.RUNNING),
    "cancel": (RequestState.QUEUED, RequestState.FINISHED),
    "expire": (RequestState.QUEUED, RequestState.FINISHED),
    "complete": (RequestState.RUNNING, RequestState.FINISHED),
    "retry": (RequestState.RUNNING, RequestState.QUEUED),
    "lose": (RequestState.RUNNING, RequestState.FINISHED),
}
# Compared once a request: a look-up on an Enum class costs ten times one of a global.
_NEW: Final = RequestState.NEW
_QUEUED: Final = RequestState.QUEUED


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request as the scheduler sees it. Compared by identity; the driver may subclass it.

    The caller's: ``rows``, the size of the batch dimension and at least 1; ``nbytes``, what it counts
    towards the queue's limit; ``merge_key``, equal for requests that may share a batch; ``deadline``,
    in seconds of the clock that ``now`` comes from; ``retriable``, whether it may run a second time;
    ``priority``, 0 for none given; ``timeout_s``, what the deadline is made of: both are None once a queue
    policy has taken it over. A request that was taken out may stay referenced for a while, so what a subclass
    holds is better dropped when it is answered.

    The scheduler's: ``enqueued_at``; ``sequence``, which numbers the accepted requests in their order;
    ``attempts``, how many workers died under it; ``cancelled``, after which nobody waits for its result;
    ``state``; ``removal_reason``, once it was taken out. And in a queue with ``levels`` only: ``lane``, where
    it waits, and ``timeout_at``, when its policy's time runs out, None for never. In a fair one ``client``.
    """

    rows: int
    nbytes: int
    merge_key: Hashable
    deadline: float | None = None
    retriable: bool = True
    priority: int = 0
    timeout_s: float | None = None
    enqueued_at: float = field(default=0.0, init=False)
    sequence: int = field(default=-1, init=False)
    attempts: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)
    state: RequestState = field(default=_NEW, init=False)
    lane: Lane = field(init=False)
    timeout_at: float | None = field(init=False)
    removal_reason: RemovalReason = field(init=False)
    client: Hashable = field(init=False)

    def renew(self) -> None:
        """Let it be submitted again, elsewhere: it was taken out of a queue in which nothing had begun it."""
        self.state, self.cancelled, self.deadline = _NEW, False, None

    @property
    def is_inner(self) -> bool:
        """Whether it is a part of one that was accepted before, and so taken also while others are not."""
        return False

    @property
    def correlation(self) -> Sequence | None:
        """The sequence that it belongs to, which a subclass knows; not looked at but in sequences."""
        return None

    @property
    def device(self) -> str:
        """The device that it must run on, "" for any; looked at only where instances are on several."""
        return ""

    def client_of(self, header: bytes) -> Hashable:
        """Return who sent the request: the value of that header, or else the address; "" if nobody is known.
        Asked for in a fair queue, and where a worker died.
        """
        return ""


def advance(requests: Iterable[QueuedRequest], event: RequestEvent) -> None:
    """Take every one of the requests through one event: a whole batch costs one look into the table."""
    source, target = TRANSITIONS[event]
    for request in requests:
        if request.state is not source:
            raise illegal(request, event)
        request.state = target


def illegal(request: QueuedRequest, event: RequestEvent) -> IllegalTransition:
    source, _ = TRANSITIONS[event]
    return IllegalTransition(
        f"request in state {request.state.name} cannot {event}: only {source.name} allows it"
    )


class Deadlines:
    """The queued requests that have a deadline, nearest first. Requests without one cost nothing. ``heap``
    holds sequence numbers only. What has left the queue is gone from ``_requests``, and its number in the
    heap means nothing any more; it keeps no request alive. Where the heap is empty, nothing is due.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[float, int]] = []
        self._requests: dict[int, QueuedRequest] = {}

    def add(self, request: QueuedRequest, deadline: float) -> None:
        self._requests[request.sequence] = request
        heapq.heappush(self.heap, (deadline, request.sequence))
        if len(self.heap) > 2 * len(self._requests) + _STALE_ALLOWED:
            self.heap = [entry for entry in self.heap if entry[1] in self._requests]
            heapq.heapify(self.heap)

    def discard(self, request: QueuedRequest) -> None:
        del self._requests[request.sequence]

    def nearest(self) -> float:
        while self.heap:
            deadline, sequence = self.heap[0]
            if sequence in self._requests:
                return deadline
            heapq.heappop(self.heap)
        return math.inf

    def first_due(self, now: float) -> QueuedRequest | None:
        """The request whose deadline is the nearest, if that is not after ``now``."""
        return None if self.nearest() > now else self._requests[self.heap[0][1]]


class WaitingRequests(Sized, Iterable[QueuedRequest], Protocol):
    """Places of requests, the next one first, as in a ``deque``; some of them may not wait any more."""

    def __getitem__(self, index: int, /) -> QueuedRequest:
        """The request at a place; the first is 0."""

    def append(self, request: QueuedRequest, /) -> None:
        """Put a new request behind all that go before it."""

    def popleft(self) -> QueuedRequest:
        """Take the first place off."""

    def extendleft(self, requests: Iterable[QueuedRequest], /) -> None:
        """Put requests back that were taken off, the last of them first."""


class WaitingRoom:
    """What waits for one model, counted and within limits, wherever it waits. ``requests``, ``rows`` and
    ``nbytes`` count all of it; ``accepted`` counts every request there ever was. Before the time
    ``due_from``, no request's time is over: a look at it saves most calls of ``first_due``.
    """

    def __init__(self, spec: QueueSpec) -> None:
        self._max_requests = spec.max_requests or sys.maxsize
        self._max_nbytes = spec.max_nbytes or sys.maxsize
        self._deadlines = Deadlines()
        self.due_from = math.inf
        self.accepted = 0
        self.requests = 0
        self.rows = 0
        self.nbytes = 0

    def add(self, request: QueuedRequest, now: float) -> None:
        """Count a new request in; its place is the caller's to give. Raises DeadlineExceeded: its deadline is
        not after ``now``; QueueFull: over the limit of requests, or of bytes. An empty queue takes a request
        of any size, or one larger than the limit could never run; IllegalTransition: it was queued before.
        """
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("Deadline Exceeded before the request was queued")
        if self.requests >= self._max_requests or self.nbytes + request.nbytes > self._max_nbytes:
            self.check_room(request, self.requests, self.nbytes)
        if request.state is not _NEW:
            raise illegal(request, "submit")
        request.state = _QUEUED
        request.enqueued_at = now
        request.sequence = self.accepted
        self.accepted += 1
        self._count(request)

    def check_room(self, request: QueuedRequest, requests: int, nbytes: int) -> None:
        if requests >= self._max_requests:
            raise QueueFull(f"Exceeds maximum queue size of {self._max_requests} requests")
        if nbytes + request.nbytes > self._max_nbytes and requests:
            raise QueueFull(
                f"Exceeds maximum queue size of {self._max_nbytes} bytes: {nbytes} bytes are queued and the "
                f"request has {request.nbytes}"
            )

    def dispatched(self, requests: Collection[QueuedRequest]) -> int:
        """Count requests out that were taken off the queue and now run; how many rows they have together."""
        advance(requests, "dispatch")
        return self._uncount(requests)

    def remove(self, request: QueuedRequest, event: Literal["cancel", "expire"]) -> None:
        """Count a queued request out for good."""
        advance((request,), event)
        self._uncount((request,))

    def lift_deadline(self, request: QueuedRequest) -> None:
        """Let a queued request that has a deadline wait, and run, for as long as it takes."""
        self._deadlines.discard(request)
        request.deadline = None

    def first_due(self, now: float) -> QueuedRequest | None:
        """A request whose time is over at ``now``; nothing may run before it was taken out."""
        return self._deadlines.first_due(now) if self.next_due() <= now else None

    def first_late(self, at: float) -> QueuedRequest | None:
        """A request whose deadline is not after that time."""
        return self._deadlines.first_due(at)

    def next_due(self) -> float:
        """When ``first_due`` will have a request to give, in seconds of the clock; infinity: never."""
        if self.due_from < math.inf:
            self.due_from = self._deadlines.nearest()
        return self.due_from

    def _watch(self, deadlines: Deadlines, request: QueuedRequest, deadline: float) -> None:
        deadlines.add(request, deadline)
        self.due_from = min(self.due_from, deadline)

    def _count(self, request: QueuedRequest) -> None:
        self.requests += 1
        self.rows += request.rows
        self.nbytes += request.nbytes
        if request.deadline is not None:
            self._watch(self._deadlines, request, request.deadline)

    def _uncount(self, requests: Collection[QueuedRequest]) -> int:
        """Count requests out; how many rows they have together."""
        rows = nbytes = 0
        for request in requests:
            rows += request.rows
            nbytes += request.nbytes
            if request.deadline is not None:
                self._deadlines.discard(request)
        self.requests -= len(requests)
        self.rows -= rows
        self.nbytes -= nbytes
        return rows


class RequestQueue(WaitingRoom):
    """What waits for one model, in its order. ``retried`` holds those whose worker died, oldest first, and
    comes before ``waiting``; ``isolated`` holds those of suspects, and comes after it. All three may hold
    places of requests that were taken out. ``BatchFormer`` takes requests off ``waiting`` before it is known
    whether they go: they count until ``dispatched`` is told.
    """

    #: Whether a new request always stands behind the older ones.
    by_age: ClassVar[bool] = True

    def __init__(self, spec: QueueSpec, waiting: WaitingRequests | None = None) -> None:
        super().__init__(spec)
        self.waiting: WaitingRequests = deque() if waiting is None else waiting
        self.retried: deque[QueuedRequest] = deque()
        self.isolated: deque[QueuedRequest] = deque()

    def put_back(self, requests: Collection[QueuedRequest]) -> None:
        """Queue requests again whose worker died, before all others. The limits let them in once already."""
        advance(requests, "retry")
        for request in requests:
            self._count(request)
        # Where several workers die one after the other, age decides, not the order of the deaths.
        by_age = sorted((*self.retried, *requests), key=operator.attrgetter("sequence"))
        self.retried = deque(by_age)

    def remove(self, request: QueuedRequest, event: Literal["cancel", "expire"]) -> None:
        """Take a queued request out for good, wherever it stands."""
        super().remove(request, event)
        if len(self.waiting) + len(self.retried) + len(self.isolated) > 2 * self.requests:
            self._sweep()

    def expire(self, request: QueuedRequest, now: float) -> bool:
        """Do with a request that is due what is to be done. True: it was taken out for good."""
        self.remove(request, "expire")
        request.removal_reason = RemovalReason.LATE
        return True

    def crowding(self, request: QueuedRequest) -> QueuedRequest | None:
        """Whose place a request may have that the limits do not let in; None: nobody's."""
        return None

    @property
    def has_retried(self) -> bool:
        return first_queued(self.retried) is not None

    def take_retried(self) -> QueuedRequest | None:
        oldest = first_queued(self.retried)
        if oldest is not None:
            self.retried.popleft()
        return oldest

    def isolate(self, requests: Collection[QueuedRequest]) -> None:
        """Let queued requests, which have no other place, run alone and after all others."""
        self.isolated.extend(requests)

    def displace(self, requests: Collection[QueuedRequest]) -> None:
        """Take the places of queued requests away, for ``isolate`` to give them others."""
        self._sweep(frozenset(requests))

    def _sweep(self, without: Collection[QueuedRequest] = ()) -> None:
        """Drop every place whose request does not wait any more, or is in ``without``."""
        self.waiting = deque(one for one in self.waiting if one.state is _QUEUED and one not in without)
        self.retried = deque(one for one in self.retried if one.state is _QUEUED and one not in without)
        self.isolated = deque(one for one in self.isolated if one.state is _QUEUED)


def first_queued(requests: WaitingRequests) -> QueuedRequest | None:
    """The first request that still waits; the places before it are dropped. None where there is none."""
    while requests:
        if requests[0].state is _QUEUED:
            return requests[0]
        requests.popleft()
    return None
