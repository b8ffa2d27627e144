"""The waiting requests of a queue by *group*: requests of one shape, which have one merge key. Pure.

A batch holds requests of one group. Without groups a batch ends at the first request of another shape, so two
shapes that alternate make batches of one request. The group whose first request is next in the queue *leads*.
A queue uses groups only from the moment when the walk of a batch meets a second merge key until the queue is
empty, so a model whose requests are alike pays nothing.

Each operation costs O(log n) for n groups at most, and O(1) for a request that is not the first of its group.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from gpuserve.front.scheduling.request_queue import QueuedRequest, RequestState

_QUEUED: Final = RequestState.QUEUED
#: The position of a request in its queue: its lane, if the queue has lanes, and its place.
_Position: TypeAlias = tuple[Any, int]


@dataclass(eq=False, slots=True)
class ShapeGroup:
    """The waiting requests of one shape, in the order of the queue, and their rows.

    ``places`` is a deque, or the lanes of a queue with priorities, and may hold places of requests that no
    longer wait. ``rows`` are those of the requests that wait. ``position`` is that of the first request when
    it was last compared with those of other groups.
    """

    key: Hashable
    places: Any
    rows: int = 0
    position: _Position | None = None


class ShapeGroups:
    """``WaitingRequests`` by group; a group of ``full_rows`` makes a batch that cannot grow."""

    #: Whether the leading group goes before its delay has expired if a full group waits behind it.
    in_turns: ClassVar[bool] = False

    def __init__(
        self, requests: Iterable[QueuedRequest], full_rows: int, new_places: Callable[[], Any]
    ) -> None:
        self._full_rows = full_rows
        self._new_places = new_places
        self._groups: dict[Hashable, ShapeGroup] = {}
        #: Heaps of positions and keys: the current ones of all groups, and of full groups, beside stale ones.
        self._leading: list[tuple[_Position, Hashable]] = []
        self._full: list[tuple[_Position, Hashable]] = []
        self._n_places = 0
        self._n_appended = 0
        for request in requests:
            if request.state is _QUEUED:
                self.append(request)

    def __len__(self) -> int:
        return self._n_places

    def __bool__(self) -> bool:
        return self.leading() is not None

    def __getitem__(self, index: int, /) -> QueuedRequest:
        """Return the first request. Requires a waiting request; only index 0 is valid."""
        first: QueuedRequest = self._groups[self._leading[0][1]].places[index]
        return first

    def __iter__(self) -> Iterator[QueuedRequest]:
        waiting = [one for group in self._groups.values() for one in group.places if one.state is _QUEUED]
        yield from sorted(waiting, key=_position)

    def popleft(self) -> QueuedRequest:
        group = self._groups[self._leading[0][1]]
        request: QueuedRequest = group.places.popleft()
        self._n_places -= 1
        if request.state is _QUEUED:
            group.rows -= request.rows
        self._update(group)
        return request

    def append(self, request: QueuedRequest) -> None:
        self._n_appended += 1
        request.place = self._n_appended
        group = self._group(request.merge_key)
        group.places.append(request)
        self._add(group, request)

    def extendleft(self, requests: Iterable[QueuedRequest]) -> None:
        for request in requests:
            group = self._group(request.merge_key)
            group.places.extendleft((request,))
            self._add(group, request)

    def discard(self, request: QueuedRequest) -> None:
        group = self._groups[request.merge_key]
        group.rows -= request.rows
        if not group.rows:
            self._n_places -= len(group.places)
            del self._groups[group.key]

    @property
    def n_groups(self) -> int:
        return len(self._groups)

    def leading(self) -> ShapeGroup | None:
        """Return the group whose first request is next in the queue; None if no request waits."""
        while self._leading:
            position, key = self._leading[0]
            group = self._groups.get(key)
            if group is not None and group.position == position and self._drop_stale(group):
                if _position(group.places[0]) == position:
                    return group
                self._update(group)
            if self._leading[0] == (position, key):
                heapq.heappop(self._leading)
        return None

    def next_group(self) -> ShapeGroup | None:
        """Return the group of the next batch, whose first request the batch begins with."""
        return self.leading()

    def full(self) -> ShapeGroup | None:
        """Return the first group, in the order of the queue, that has the rows of a full batch."""
        while self._full:
            position, key = self._full[0]
            group = self._groups.get(key)
            if group is not None and group.rows >= self._full_rows and self._drop_stale(group):
                now_at = _position(group.places[0])
                if now_at == position:
                    return group
                heapq.heapreplace(self._full, (now_at, key))
            else:
                heapq.heappop(self._full)
        return None

    def full_behind(self, first: QueuedRequest) -> ShapeGroup | None:
        group = self.full()
        return group if group is not None and _lane(group.places[0]) == _lane(first) else None

    def group(self, key: Hashable) -> ShapeGroup | None:
        """Return the group of a merge key; None if none of its requests waits."""
        return self._groups.get(key)

    def rows_of(self, key: Hashable) -> int:
        group = self._groups.get(key)
        return 0 if group is None else group.rows

    def popped(self, group: ShapeGroup, n_places: int, rows: int) -> None:
        """Account for places that the caller popped off ``group.places``, and for rows that waited there."""
        self._n_places -= n_places
        group.rows -= rows
        self._update(group)

    def without(self, requests: Collection[QueuedRequest]) -> ShapeGroups:
        return type(self)((one for one in self if one not in requests), self._full_rows, self._new_places)

    def _group(self, key: Hashable) -> ShapeGroup:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = ShapeGroup(key, self._new_places())
        return group

    def _add(self, group: ShapeGroup, request: QueuedRequest) -> None:
        self._n_places += 1
        was_full = group.rows >= self._full_rows
        group.rows += request.rows
        position = _position(request)
        if group.position is None or position < group.position:
            group.position = position
            heapq.heappush(self._leading, (position, group.key))
            was_full = False
        if not was_full and group.rows >= self._full_rows:
            heapq.heappush(self._full, (group.position, group.key))

    def _update(self, group: ShapeGroup) -> None:
        """Bring the position of a group that lost places up to date; forget an empty group."""
        if not self._drop_stale(group):
            return
        position = _position(group.places[0])
        if group.position != position:
            group.position = position
            heapq.heappush(self._leading, (position, group.key))

    def _drop_stale(self, group: ShapeGroup) -> bool:
        """Drop places of requests that no longer wait from the head of a group. False: none is left."""
        places = group.places
        before = len(places)
        while places and places[0].state is not _QUEUED:
            places.popleft()
        self._n_places -= before - len(places)
        if places:
            return True
        del self._groups[group.key]
        return False


class FairShapeGroups(ShapeGroups):
    """The groups of a queue that is fair to its clients. A turn is a batch: it begins with the oldest request
    of the client whose turn it is, and takes further requests of this shape from its client and others, who
    take turns by rows within the group (``FairLane``). The turn of each client whose oldest request is in the
    batch is over. So no client leads twice while another waits with its oldest request.

    Until a batch is dispatched, its requests keep their places in the turns: a batch that is dissolved, or a
    cancelled request, changes no turn.
    """

    in_turns: ClassVar[bool] = True

    def __init__(
        self, requests: Iterable[QueuedRequest], full_rows: int, new_places: Callable[[], Any]
    ) -> None:
        #: By lane and client, in the order of turns: requests by sequence number, oldest first.
        self._turns: dict[Any, OrderedDict[Hashable, OrderedDict[int, QueuedRequest]]] = {}
        super().__init__(requests, full_rows, new_places)

    def __iter__(self) -> Iterator[QueuedRequest]:
        for lane in sorted(self._turns):
            for waiting in self._turns[lane].values():
                yield from waiting.values()

    def append(self, request: QueuedRequest) -> None:
        super().append(request)
        turns = self._turns.setdefault(request.lane, OrderedDict())
        turns.setdefault(request.client, OrderedDict())[request.sequence] = request

    def discard(self, request: QueuedRequest) -> None:
        super().discard(request)
        self._remove(request)

    def next_group(self) -> ShapeGroup | None:
        if not self._turns:
            return None
        turns = self._turns[min(self._turns)]
        request = next(iter(next(iter(turns.values())).values()))
        group = self._groups[request.merge_key]
        n_places = len(group.places)
        group.places.promote(request)
        self.popped(group, n_places - len(group.places), 0)
        return group

    def end_turns(self, requests: Iterable[QueuedRequest]) -> None:
        """Remove dispatched requests, and end the turns of the clients whose oldest requests they are."""
        for request in requests:
            turns = self._turns.get(request.lane)
            waiting = None if turns is None else turns.get(request.client)
            if turns is None or waiting is None or request.sequence not in waiting:
                continue  # a retried or isolated request
            is_oldest = next(iter(waiting)) == request.sequence
            self._remove(request)
            if is_oldest and waiting:
                turns.move_to_end(request.client)

    def _remove(self, request: QueuedRequest) -> None:
        turns = self._turns[request.lane]
        waiting = turns[request.client]
        del waiting[request.sequence]
        if not waiting:
            del turns[request.client]
            if not turns:
                del self._turns[request.lane]


def _lane(request: QueuedRequest) -> Any:
    return getattr(request, "lane", None)


def _position(request: QueuedRequest) -> _Position:
    return _lane(request), request.place


class MixedShapes:
    """Detects that shapes keep batches small: most had few of the waiting rows, in several groups."""

    #: The number of such batches, less that of others, from which on shapes are reported.
    ENOUGH: Final = 256
    _FEW_GROUPS: Final = 3
    _WAITING: Final = 4

    def __init__(self) -> None:
        self._excess = 0
        self._is_reported = False

    def observe(self, rows: int, queued_rows: int, n_groups: int) -> bool:
        """Record a batch of ``rows`` and what waits behind it. Return whether to report it, once."""
        is_small = n_groups > self._FEW_GROUPS and queued_rows >= self._WAITING * rows
        self._excess = max(0, self._excess + (1 if is_small else -1))
        if self._is_reported or self._excess < self.ENOUGH:
            return False
        self._is_reported = True
        return True
