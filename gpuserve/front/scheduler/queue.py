"""The requests that wait for one model: their states, the queue's limits, and their deadlines.

Pure like all of the batcher: no clock (``now`` is an argument, in seconds of any one monotonic
clock), no event loop, no I/O, no logging. Which of the waiting requests share a batch is not decided
here but in ``batcher.py``.

A request's life::

    NEW ──submit──► QUEUED ──dispatch──► RUNNING ──complete, lose──► FINISHED
                      ▲ │                   │                           ▲
                      │ └──cancel, expire───┼───────────────────────────┘
                      └───────retry─────────┘

Nothing is ever searched for in a queue. A request that is cancelled or expires changes its state and
leaves the counts at once; its place is skipped when it comes to the front, and all such places are
swept as soon as they outnumber the requests that wait. So both cost O(1) a request, amortised, and
a queue that no instance empties does not grow with what was taken out of it.
"""

from __future__ import annotations

import enum
import heapq
import operator
import sys
from collections import deque
from collections.abc import Collection, Hashable, Iterable
from typing import Any, Final, Literal, TypeAlias

from gpuserve.errors import DeadlineExceeded, QueueFull
from gpuserve.spec import QueueSpec

#: How many stale entries the deadlines may hold before it is worth sorting them out.
_STALE_ALLOWED: Final = 64


class RequestState(enum.Enum):
    """Where a request is. Only ``FINISHED`` is final."""

    NEW = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


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
_QUEUED: Final = RequestState.QUEUED


class IllegalTransition(RuntimeError):
    """A request met an event that its state does not know: a mistake of the caller, never of a client."""


class QueuedRequest:
    """One request as the scheduler sees it. Compared by identity; the driver may subclass it.

    The caller's: ``rows``, the size of the batch dimension and at least 1; ``nbytes``, what it counts
    towards the queue's limit; ``merge_key``, equal for requests that may share a batch; ``deadline``,
    in seconds of the clock that ``now`` comes from; ``retriable``, whether it may run a second time.
    ``payload`` is never looked at. A request that was taken out may stay referenced for a while, so a
    large payload is better dropped by the caller when it has answered.

    The scheduler's: ``enqueued_at``; ``sequence``, which numbers the accepted requests in their order;
    ``attempts``, how many workers died under it; ``cancelled``, after which nobody waits for its result;
    ``state``.
    """

    __slots__ = (
        "attempts",
        "cancelled",
        "deadline",
        "enqueued_at",
        "merge_key",
        "nbytes",
        "payload",
        "retriable",
        "rows",
        "sequence",
        "state",
    )

    def __init__(
        self,
        rows: int,
        nbytes: int,
        merge_key: Hashable,
        deadline: float | None = None,
        payload: Any = None,
        retriable: bool = True,
    ) -> None:
        self.rows = rows
        self.nbytes = nbytes
        self.merge_key = merge_key
        self.deadline = deadline
        self.payload = payload
        self.retriable = retriable
        self.enqueued_at = 0.0
        self.sequence = -1
        self.attempts = 0
        self.cancelled = False
        self.state = RequestState.NEW


def advance(requests: Iterable[QueuedRequest], event: RequestEvent) -> None:
    """Take every one of the requests through one event: a whole batch costs one look into the table.

    Raises:
        IllegalTransition: one of them is not in the state that the event starts from.
    """
    source, target = TRANSITIONS[event]
    for request in requests:
        if request.state is not source:
            raise IllegalTransition(
                f"request in state {request.state.name} cannot {event}: only {source.name} allows it"
            )
        request.state = target


class Deadlines:
    """The queued requests that have a deadline, nearest first. Requests without one cost nothing.

    The heap holds sequence numbers only. What has left the queue is gone from ``_requests``, and its number
    in the heap means nothing any more; it keeps no request alive.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._requests: dict[int, QueuedRequest] = {}

    def add(self, request: QueuedRequest, deadline: float) -> None:
        """Watch a request that is queued."""
        self._requests[request.sequence] = request
        heapq.heappush(self._heap, (deadline, request.sequence))
        if len(self._heap) > 2 * len(self._requests) + _STALE_ALLOWED:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapq.heapify(self._heap)

    def discard(self, request: QueuedRequest) -> None:
        """Forget a request that leaves the queue."""
        del self._requests[request.sequence]

    def nearest(self) -> float | None:
        """The nearest deadline; None where there is none."""
        while self._heap:
            deadline, sequence = self._heap[0]
            if sequence in self._requests:
                return deadline
            heapq.heappop(self._heap)
        return None

    def first_due(self, now: float) -> QueuedRequest | None:
        """The request whose deadline is the nearest, if that is not after ``now``."""
        deadline = self.nearest()
        if deadline is None or deadline > now:
            return None
        return self._requests[self._heap[0][1]]


class RequestQueue:
    """What waits for one model, within limits. ``requests``, ``rows`` and ``nbytes`` count all of it;
    ``accepted`` counts every request there ever was.

    ``retried`` holds those whose worker died, oldest first, and comes before ``waiting``; both may hold
    places of requests that were taken out. ``BatchFormer`` takes requests off ``waiting`` before it is
    known whether they go: they count until ``dispatched`` is told.
    """

    def __init__(self, spec: QueueSpec) -> None:
        self._max_requests = spec.max_requests or sys.maxsize
        self._max_nbytes = spec.max_nbytes or sys.maxsize
        self.waiting: deque[QueuedRequest] = deque()
        self.retried: deque[QueuedRequest] = deque()
        self.deadlines = Deadlines()
        self.accepted = 0
        self.requests = 0
        self.rows = 0
        self.nbytes = 0

    def add(self, request: QueuedRequest, now: float) -> None:
        """Put a new request at the end.

        Raises:
            DeadlineExceeded: its deadline is not after ``now``.
            QueueFull: over the limit of requests, or of bytes. An empty queue takes a request of any
                size, or one larger than the limit could never run.
            IllegalTransition: it was queued before.
        """
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("Request timeout expired before the request was queued")
        if self.requests >= self._max_requests:
            raise QueueFull(f"Exceeds maximum queue size of {self._max_requests} requests")
        if self.requests and self.nbytes + request.nbytes > self._max_nbytes:
            raise QueueFull(
                f"Exceeds maximum queue size of {self._max_nbytes} bytes: {self.nbytes} bytes are queued "
                f"and the request has {request.nbytes}"
            )
        advance((request,), "submit")
        request.enqueued_at = now
        request.sequence = self.accepted
        self.accepted += 1
        self.waiting.append(request)
        self._count(request)

    def put_back(self, requests: Collection[QueuedRequest]) -> None:
        """Queue requests again whose worker died, before all others. The limits let them in once already."""
        advance(requests, "retry")
        for request in requests:
            self._count(request)
        # Where several workers die one after the other, age decides, not the order of the deaths.
        by_age = sorted((*self.retried, *requests), key=operator.attrgetter("sequence"))
        self.retried = deque(by_age)

    def dispatched(self, requests: Collection[QueuedRequest]) -> None:
        """Count requests out that were taken off the queue and now run."""
        advance(requests, "dispatch")
        self._uncount(requests)

    def remove(self, request: QueuedRequest, event: Literal["cancel", "expire"]) -> None:
        """Take a queued request out for good, wherever it stands."""
        advance((request,), event)
        self._uncount((request,))
        if len(self.waiting) + len(self.retried) > 2 * self.requests:
            self.waiting = deque(one for one in self.waiting if one.state is _QUEUED)
            self.retried = deque(one for one in self.retried if one.state is _QUEUED)

    def take_retried(self) -> QueuedRequest | None:
        """Take the oldest request off that is to run a second time."""
        oldest = first_queued(self.retried)
        if oldest is not None:
            self.retried.popleft()
        return oldest

    def _count(self, request: QueuedRequest) -> None:
        self.requests += 1
        self.rows += request.rows
        self.nbytes += request.nbytes
        if request.deadline is not None:
            self.deadlines.add(request, request.deadline)

    def _uncount(self, requests: Collection[QueuedRequest]) -> None:
        rows = nbytes = 0
        for request in requests:
            rows += request.rows
            nbytes += request.nbytes
            if request.deadline is not None:
                self.deadlines.discard(request)
        self.requests -= len(requests)
        self.rows -= rows
        self.nbytes -= nbytes


def first_queued(requests: deque[QueuedRequest]) -> QueuedRequest | None:
    """The first request that still waits; the places before it are dropped. None where there is none."""
    while requests:
        if requests[0].state is _QUEUED:
            return requests[0]
        requests.popleft()
    return None
