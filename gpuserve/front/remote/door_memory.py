"""The memory of a door as it shares it with the front: inputs in its own arena, and segments of workers'
arenas that it was lent, where outputs lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.requests.inference import RegionSlice
from gpuserve_worker.memory import arena
from gpuserve_worker.memory.arena import Arena, Block, OutOfMemory
from gpuserve_worker.protocol.wire import INLINE_NBYTES


class DoorMemory:
    """What a door says of its tensors, and where it finds those of the front. ``obey`` says who takes which
    message of the front.
    """

    def __init__(self, passage: Passage, max_arena_nbytes: int) -> None:
        self._passage = passage
        #: Set when the front is told of a tensor that is no small one.
        self.is_used = False
        #: What the front has of the arena, by place.
        self._blocks: dict[tuple[int, int], Block] = {}
        self._lent = arena.Mapping()
        #: Counts the fronts: leases of one before mean nothing to this one.
        self.epoch = 0
        #: Leases of responses that were closed in this turn of the loop.
        self._closed: list[int] = []
        self.arena = Arena(max_arena_nbytes, self._on_segment, self._on_drop)
        self.obey: Mapping[type, Callable[[Any], None]] = {
            messages.Freed: self._on_freed,
            messages.UnlendSegment: self._on_unlent,
        }

    def told(self, data: Any, problem: str | None = None) -> Any:
        """A tensor as the front is told of it, with the problem of its strings if they were looked at. A
        large one that is not in the arena yet is copied there.
        """
        if type(data) is bytes and len(data) <= INLINE_NBYTES:
            return data
        self.is_used = True
        if isinstance(data, RegionSlice):
            return place_of(data)
        if not isinstance(data, Block) or not self.arena.has(data):
            data = self._placed(data)
            if type(data) is bytes:
                return data
        self._blocks[data.segment, data.offset] = data
        place = data.segment, data.offset, data.nbytes
        return place if problem is None else (*place, problem)

    def _placed(self, data: Any) -> bytes | Block:
        """Copy a tensor into the arena, or to the heap where it is small or the arena is full. One in a block
        of an arena before, which came for a front that has died, is freed there.
        """
        view = data.view if isinstance(data, Block) else data
        found: bytes | Block
        try:
            if len(view) > INLINE_NBYTES:
                found = self.arena.allocate(len(view))
                found.view[:] = view
            else:
                found = bytes(view)
        except OutOfMemory:
            found = bytes(view)
        if isinstance(data, Block):
            data.free()
        return found

    def view(self, told: Any) -> bytes | memoryview:
        """The bytes of an output that the front tells of."""
        return told if type(told) is bytes else self._lent.view(*told)

    def attach(self, message: messages.LendSegment, fds: list[int]) -> None:
        """Map a segment that is lent; its descriptor stays the caller's."""
        self._lent.attach(message.segment, fds[0], message.nbytes)

    def close_lease(self, epoch: int, lease: int) -> None:
        """What a response referred to is not needed any more."""
        if epoch != self.epoch:
            return
        if not self._closed:
            self._passage.call_at_next(self._say_closed)
        self._closed.append(lease)

    def lose(self) -> None:
        """Give up what was shared with a front that has died. Workers may still read this door's old
        segments, which stay while they have them, and responses that are being written the workers': neither
        is used for anything else, since workers begin with a new arena at each front.
        """
        self.epoch += 1
        self._closed.clear()
        self._lent.close()
        self._lent = arena.Mapping()
        self.arena.abandon()
        blocks, self._blocks = self._blocks, {}
        for block in blocks.values():
            block.free()

    def introduce(self) -> None:
        """Tell a new front of the arena."""
        for segment, fd, nbytes in self.arena.segments():
            self._on_segment(segment, fd, nbytes)

    def close(self) -> None:
        self._lent.close()
        self.arena.close()

    def _say_closed(self) -> None:
        closed, self._closed = self._closed, []
        self._passage.post(messages.Closed(tuple(closed)))

    def _on_freed(self, message: messages.Freed) -> None:
        for place in message.blocks:
            self._blocks.pop(place).free()

    def _on_unlent(self, message: messages.UnlendSegment) -> None:
        self._lent.detach(message.segment)

    def _on_segment(self, segment: int, fd: int, nbytes: int) -> None:
        self._passage.send(messages.DoorSegment(segment, nbytes), [fd])

    def _on_drop(self, segment: int) -> None:
        self._passage.post(messages.DropDoorSegment(segment))


def place_of(one: RegionSlice) -> tuple[str, int, int]:
    """A place in a client's region, as the front is told of it."""
    return one.region, one.offset, one.nbytes
