"""The request queue of one model: request states, queue limits and deadlines.

Pure, like all of this folder: ``now`` is an argument, in seconds of any one monotonic clock.
``batch_former.py`` decides which requests share a batch. ``priority_queue.py`` adds priorities and queue
policies.

The states of a request::

    NEW ──submit──► QUEUED ──dispatch──► RUNNING ──complete, lose──► FINISHED
                      ▲ │                   │                           ▲
                      │ └──cancel, expire───┼───────────────────────────┘
                      └───────retry─────────┘

No operation searches the queue. A request that is cancelled or expires changes its state and leaves the
counts at once. The queue skips its place when the place comes to the front, and sweeps all such places as
soon as they outnumber the waiting requests: O(1) per request, amortised.
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
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

from gpuserve.core.errors import DeadlineExceeded, QueueFull
from gpuserve.core.states import IllegalTransition
from gpuserve.model.spec import QueueSpec

if TYPE_CHECKING:
    from gpuserve.front.requests.inference import Sequence


#: The most stale heap entries that ``Deadlines`` keeps before it rebuilds the heap.
_STALE_ALLOWED: Final = 64


class RequestState(enum.Enum):
    """The state of a request. Only ``FINISHED`` is final."""

    NEW = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class RemovalReason(enum.Enum):
    """The reason why the scheduler removed a request from the queue."""

    LATE = "its time ran out"
    HOPELESS = "it could not have ended in time"
    WAITED = "its queue policy lets it wait no longer"
    CROWDING = "the queue was full, and its client had the most in it"
    ISOLATED = "its worker died, and its client's requests had killed workers before"
    LATE_IN_BACKLOG = "its time ran out before its sequence had a slot"
    CANCELLED = "another request of its sequence was given up"


#: A priority level (1 is served first) and whether the policy's timeout has delayed the request. The lesser
#: lane is served first.
Lane: TypeAlias = tuple[int, bool]

RequestEvent: TypeAlias = Literal["submit", "dispatch", "cancel", "expire", "complete", "retry", "lose"]

#: Event -> (the only state in which the event may happen, the state that follows).
TRANSITIONS: Final[dict[RequestEvent, tuple[RequestState, RequestState]]] = {
    "submit": (RequestState.NEW, RequestState.QUEUED),
    "dispatch": (RequestState.QUEUED, RequestState.RUNNING),
    "cancel": (RequestState.QUEUED, RequestState.FINISHED),
    "expire": (RequestState.QUEUED, RequestState.FINISHED),
    "complete": (RequestState.RUNNING, RequestState.FINISHED),
    "retry": (RequestState.RUNNING, RequestState.QUEUED),
    "lose": (RequestState.RUNNING, RequestState.FINISHED),
}
# Compared once per request: a look-up on an Enum class costs ten times a look-up of a global.
_NEW: Final = RequestState.NEW
_QUEUED: Final = RequestState.QUEUED


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request as the scheduler sees it, compared by identity. The driver may subclass it.

    The caller sets ``rows``, the size of the batch dimension, at least 1; ``nbytes``, the size that counts
    towards the queue's limit; ``merge_key``, equal for requests that may share a batch; ``row_elements`` and
    ``row_shapes``, the elements of a row and its shapes in inputs of which several sizes vary, for a model
    with a limit of elements; ``deadline``, in seconds of the scheduler's clock; ``retriable``, whether the
    request may run a second time; ``priority``, 0 if the client gave none; ``timeout_s``, the source of the
    deadline. A queue policy that takes the timeout over sets both ``deadline`` and ``timeout_s`` to None. The
    scheduler may refer to a removed request for a while, so a subclass should drop its resources when it is
    answered.

    The scheduler sets ``enqueued_at``; ``sequence``, which numbers accepted requests in their order;
    ``attempts``, the number of workers that died while they ran the request; ``cancelled``, after which
    nobody waits for the result; ``state``; ``removal_reason``, after a removal. Only ``PriorityQueue`` sets
    ``lane`` and ``timeout_at``, the time at which the policy's timeout expires (None: never). Only
    ``FairQueue`` sets ``client``, only ``ShapeGroups`` sets ``place``.
    """

    rows: int
    nbytes: int
    merge_key: Hashable
    deadline: float | None = None
    retriable: bool = True
    priority: int = 0
    timeout_s: float | None = None
    row_elements: int = 0
    row_shapes: tuple[tuple[int, ...], ...] = ()
    enqueued_at: float = field(default=0.0, init=False)
    sequence: int = field(default=-1, init=False)
    attempts: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)
    state: RequestState = field(default=_NEW, init=False)
    lane: Lane = field(init=False)
    timeout_at: float | None = field(init=False)
    removal_reason: RemovalReason = field(init=False)
    client: Hashable = field(init=False)
    place: int = field(init=False)

    def reset(self) -> None:
        """Allow a request that was removed from a queue before any instance ran it to be submitted again."""
        self.state, self.cancelled, self.deadline = _NEW, False, None

    @property
    def is_ensemble_step(self) -> bool:
        """Return whether it is an accepted ensemble's step, so also accepted while draining."""
        return False

    @property
    def correlation(self) -> Sequence | None:
        """Return the request's sequence, used only by models with sequences. A subclass overrides this."""
        return None

    @property
    def device(self) -> str:
        """Return the device that must run the request ("" for any), used if instances are on several."""
        return ""

    @property
    def near(self) -> str:
        """Return the device whose memory holds most of the request's inputs, or ""."""
        return ""

    def client_of(self, header: bytes) -> Hashable:
        """Return the client: ``header``'s value, the address, or "". For fair queues and worker deaths."""
        return ""


def advance(requests: Iterable[QueuedRequest], event: RequestEvent) -> None:
    """Move all requests through one event. A whole batch costs one look-up in the transition table."""
    source, target = TRANSITIONS[event]
    for request in requests:
        if request.state is not source:
            raise illegal_transition(request, event)
        request.state = target


def illegal_transition(request: QueuedRequest, event: RequestEvent) -> IllegalTransition:
    source, _ = TRANSITIONS[event]
    return IllegalTransition(
        f"request in state {request.state.name} cannot {event}: only {source.name} allows it"
    )


class PaddedRow(NamedTuple):
    """The row to which a batch is padded: of each size that varies, the largest of the requests."""

    elements: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()

    def including(self, request: QueuedRequest) -> PaddedRow:
        shapes = request.row_shapes
        if not shapes:
            elements = request.row_elements
            return self if elements <= self.elements else PaddedRow(elements)
        if self.shapes:
            shapes = tuple([tuple(map(max, *pair)) for pair in zip(self.shapes, shapes, strict=True)])
        return PaddedRow(max(map(math.prod, shapes)), shapes)


#: The row of a batch without requests.
EMPTY_ROW: Final = PaddedRow()


class Deadlines:
    """The queued requests that have a deadline, nearest first. Requests without a deadline cost nothing.

    ``heap`` holds sequence numbers only, so a stale entry keeps no request alive. A request that has left the
    queue is no longer in ``_requests``. If the heap is empty, nothing is due.
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
        """Return the request with the nearest deadline if that deadline is not after ``now``."""
        return None if self.nearest() > now else self._requests[self.heap[0][1]]


class WaitingRequests(Sized, Iterable[QueuedRequest], Protocol):
    """An ordered collection like a ``deque`` of requests, some of which may no longer wait."""

    def __getitem__(self, index: int, /) -> QueuedRequest:
        """Return the request at an index; 0 is the next request."""

    def append(self, request: QueuedRequest, /) -> None:
        """Append a new request."""

    def popleft(self) -> QueuedRequest:
        """Remove and return the next request."""

    def extendleft(self, requests: Iterable[QueuedRequest], /) -> None:
        """Put removed requests back at the front, the last of them first."""


class GroupedRequests(WaitingRequests, Protocol):
    """Waiting requests in groups that count their rows."""

    @property
    def n_groups(self) -> int:
        """Return the number of groups in which requests wait."""

    def discard(self, request: QueuedRequest) -> None:
        """Subtract a request that no longer waits; its place is dropped later."""

    def full_behind(self, first: QueuedRequest) -> object | None:
        """Return the first group in the lane of ``first`` that has the rows of a full batch, or None."""

    def rows_of(self, key: Hashable) -> int:
        """Return the rows that wait in the group of a merge key."""

    def without(self, requests: Collection[QueuedRequest]) -> GroupedRequests:
        """Return the groups without stale places and without ``requests``."""


class QueueAccounting:
    """The counts, limits and deadlines of the requests that wait for one model, whatever order they wait in.

    ``requests``, ``rows`` and ``nbytes`` are current totals; ``accepted`` counts all requests ever accepted.
    No request is due before the time ``due_from``: a comparison with it saves most calls of ``first_due``.
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
        """Count a new request. The caller puts the request in its place.

        An empty queue accepts a request of any size, because a request larger than the limit could otherwise
        never run. Raises DeadlineExceeded if the request's deadline is not after ``now``; QueueFull if the
        limit of requests or bytes is reached; IllegalTransition if the request was queued before.
        """
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("Deadline Exceeded before the request was queued")
        if self.requests >= self._max_requests or self.nbytes + request.nbytes > self._max_nbytes:
            self.check_room(request, self.requests, self.nbytes)
        if request.state is not _NEW:
            raise illegal_transition(request, "submit")
        request.state = _QUEUED
        request.enqueued_at = now
        request.sequence = self.accepted
        self.accepted += 1
        self._count(request)

    def check_room(self, request: QueuedRequest, requests: int, nbytes: int) -> None:
        """Raise QueueFull if ``request`` does not fit beside ``requests`` requests of ``nbytes`` bytes."""
        if requests >= self._max_requests:
            raise QueueFull(f"Exceeds maximum queue size of {self._max_requests} requests")
        if nbytes + request.nbytes > self._max_nbytes and requests:
            raise QueueFull(
                f"Exceeds maximum queue size of {self._max_nbytes} bytes: {nbytes} bytes are queued and the "
                f"request has {request.nbytes}"
            )

    def mark_dispatched(self, requests: Collection[QueuedRequest]) -> int:
        """Uncount requests that were taken off the queue and now run. Returns the sum of their rows."""
        advance(requests, "dispatch")
        return self._uncount(requests)

    def remove(self, request: QueuedRequest, event: Literal["cancel", "expire"]) -> None:
        """Uncount a queued request that leaves the queue for good."""
        advance((request,), event)
        self._uncount((request,))

    def drop_deadline(self, request: QueuedRequest) -> None:
        """Remove the deadline of a queued request, so that it may wait and run for any time."""
        self._deadlines.discard(request)
        request.deadline = None

    def first_due(self, now: float) -> QueuedRequest | None:
        """Return a request whose time is over at ``now``. The caller must remove it before anything runs."""
        return self._deadlines.first_due(now) if self.next_due() <= now else None

    def first_late(self, at: float) -> QueuedRequest | None:
        """Return a request whose deadline is not after the time ``at``."""
        return self._deadlines.first_due(at)

    def next_due(self) -> float:
        """Return when ``first_due`` will next return a request, in seconds; infinity for never."""
        if self.due_from < math.inf:
            self.due_from = self._deadlines.nearest()
        return self.due_from

    def _add_deadline(self, deadlines: Deadlines, request: QueuedRequest, deadline: float) -> None:
        deadlines.add(request, deadline)
        self.due_from = min(self.due_from, deadline)

    def _count(self, request: QueuedRequest) -> None:
        self.requests += 1
        self.rows += request.rows
        self.nbytes += request.nbytes
        if request.deadline is not None:
            self._add_deadline(self._deadlines, request, request.deadline)

    def _uncount(self, requests: Collection[QueuedRequest]) -> int:
        """Uncount requests and return the sum of their rows."""
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


class RequestQueue(QueueAccounting):
    """The queue of one model, in order of service.

    ``retried`` holds the requests whose worker died, oldest first, and comes before ``waiting``; ``isolated``
    holds the requests of suspect clients, and comes after ``waiting``. All three may contain requests that
    were removed. ``BatchFormer`` takes requests off ``waiting`` before they are sure to run: they count until
    ``mark_dispatched`` is called.
    """

    #: Whether a new request always stands behind all older requests.
    by_age: ClassVar[bool] = True

    def __init__(self, spec: QueueSpec, waiting: WaitingRequests | None = None) -> None:
        super().__init__(spec)
        self.waiting: WaitingRequests = deque() if waiting is None else waiting
        #: ``waiting``, while it is in groups because requests of several shapes wait.
        self.groups: GroupedRequests | None = None
        self.retried: deque[QueuedRequest] = deque()
        self.isolated: deque[QueuedRequest] = deque()

    def requeue(self, requests: Collection[QueuedRequest]) -> None:
        """Queue requests whose worker died again, before all others and regardless of limits."""
        advance(requests, "retry")
        for request in requests:
            self._count(request)
        # If several workers die in succession, the age of requests decides, not the order of the deaths.
        by_age = sorted((*self.retried, *requests), key=operator.attrgetter("sequence"))
        self.retried = deque(by_age)

    def put_back(self, request: QueuedRequest) -> None:
        """Queue a request that no instance has begun before all others that wait, regardless of limits."""
        advance((request,), "retry")
        self._count(request)
        self.waiting.extendleft((request,))

    def remove(self, request: QueuedRequest, event: Literal["cancel", "expire"]) -> None:
        """Remove a queued request for good, wherever it stands."""
        super().remove(request, event)
        groups = self.groups
        if groups is not None and request not in self.retried and request not in self.isolated:
            groups.discard(request)
        if len(self.waiting) + len(self.retried) + len(self.isolated) > 2 * self.requests:
            self._sweep()

    def expire(self, request: QueuedRequest, now: float) -> bool:
        """Remove a request that is due. Returns True if it was removed for good."""
        self.remove(request, "expire")
        request.removal_reason = RemovalReason.LATE
        return True

    def evictable_for(self, request: QueuedRequest) -> QueuedRequest | None:
        """Return the queued request to evict so that ``request`` fits within the limits, or None."""
        return None

    def new_places(self) -> WaitingRequests:
        """Return an empty container for waiting requests."""
        return deque()

    @property
    def has_retried(self) -> bool:
        return first_queued(self.retried) is not None

    def pop_retried(self) -> QueuedRequest | None:
        oldest = first_queued(self.retried)
        if oldest is not None:
            self.retried.popleft()
        return oldest

    def isolate(self, requests: Collection[QueuedRequest]) -> None:
        """Queue requests that have no other place to run alone and after all others."""
        self.isolated.extend(requests)

    def remove_places(self, requests: Collection[QueuedRequest]) -> None:
        """Remove the places of queued requests, so that ``isolate`` can queue them again."""
        self._sweep(frozenset(requests))

    def _sweep(self, without: Collection[QueuedRequest] = ()) -> None:
        """Drop every place whose request no longer waits, or is in ``without``."""
        if self.groups is None:
            self.waiting = deque(one for one in self.waiting if one.state is _QUEUED and one not in without)
        else:
            self.waiting = self.groups = self.groups.without(without)
        self.retried = deque(one for one in self.retried if one.state is _QUEUED and one not in without)
        self.isolated = deque(one for one in self.isolated if one.state is _QUEUED)


def first_queued(requests: WaitingRequests) -> QueuedRequest | None:
    """Return the first request that still waits, dropping the places before it. None if there is none."""
    while requests:
        if requests[0].state is _QUEUED:
            return requests[0]
        requests.popleft()
    return None
