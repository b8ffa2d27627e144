"""The memory that an ingress process shares with the front and workers: inputs in its arena, outputs in lent
segments of workers' arenas. The front reads none of these bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gpuserve.front.ingress import channel_messages as messages
from gpuserve.front.ingress.ipc_channel import IpcChannel
from gpuserve.front.ipc.worker_memory import LentBlock, OutputMemory
from gpuserve.front.requests.inference import InferResponse, OutputTensor, RegionSlice
from gpuserve_worker.memory import arena
from gpuserve_worker.memory.arena import Arena, Block, OutOfMemory
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.wire import INLINE_NBYTES


class IngressMemory:
    """The memory of one ingress process: it describes tensors for the front, and maps those of the front."""

    def __init__(self, channel: IpcChannel, max_arena_nbytes: int) -> None:
        self._channel = channel
        #: Set when a described tensor refers to shared memory or a region.
        self.has_references = False
        #: The blocks of the arena that the front refers to, by place.
        self._blocks: dict[tuple[int, int], Block] = {}
        self._lent = arena.Mapping()
        #: Counts fronts: leases of a former one are void.
        self.epoch = 0
        #: Leases of responses closed in this turn of the event loop.
        self._closed: list[int] = []
        self.arena = Arena(max_arena_nbytes, self._on_segment, self._on_drop)
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            wire.Free: self._on_freed,
            wire.Unlend: lambda message: self._lent.detach(message.segment),
        }

    def describe(self, data: Any, problem: str | None = None) -> Any:
        """Return a tensor as the front gets it, with the problem of its strings if they were checked."""
        if type(data) is bytes and len(data) <= INLINE_NBYTES:
            return data
        self.has_references = True
        if isinstance(data, RegionSlice):
            return place_of(data)
        if not isinstance(data, Block) or not self.arena.has(data):
            data = self._copy_in(data)
            if type(data) is bytes:
                return data
        self._blocks[data.segment, data.offset] = data
        place = data.segment, data.offset, data.nbytes
        return place if problem is None else (*place, problem)

    def _copy_in(self, data: Any) -> bytes | Block:
        """Copy a tensor into the arena, or to the heap if small or without room. Free a former block."""
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

    def view(self, described: Any) -> bytes | memoryview:
        """Return the bytes of an output that the front described."""
        return described if type(described) is bytes else self._lent.view(*described)

    def attach(self, message: wire.Lend, fds: list[int]) -> None:
        """Map a lent segment. The caller keeps its descriptor."""
        self._lent.attach(message.segment, fds[0], message.nbytes)

    def close_lease(self, epoch: int, lease: int) -> None:
        """Release the memory of a response."""
        if epoch != self.epoch:
            return
        if not self._closed:
            self._channel.call_at_next(self._send_closed)
        self._closed.append(lease)

    def on_front_died(self) -> None:
        """Drop all memory shared with the dead front.

        Workers may still read old segments of this process, and this process may still write responses from
        segments of workers. Neither memory is reused, because workers start a new arena for each front.
        """
        self.epoch += 1
        self._closed.clear()
        self._lent.close()
        self._lent = arena.Mapping()
        self.arena.abandon()
        blocks, self._blocks = self._blocks, {}
        for block in blocks.values():
            block.free()

    def announce_arena(self) -> None:
        """Announce the arena to a new front."""
        for segment, fd, nbytes in self.arena.segments():
            self._on_segment(segment, fd, nbytes)

    def close(self) -> None:
        self._lent.close()
        self.arena.close()

    def _send_closed(self) -> None:
        closed, self._closed = self._closed, []
        self._channel.post(messages.LeasesClosed(tuple(closed)))

    def _on_freed(self, message: wire.Free) -> None:
        for place in message.blocks:
            self._blocks.pop(place).free()

    def _on_segment(self, segment: int, fd: int, nbytes: int) -> None:
        self._channel.send(wire.Segment(segment, nbytes), [fd])

    def _on_drop(self, segment: int) -> None:
        self._channel.post(wire.DropSegment(segment))


def place_of(one: RegionSlice) -> tuple[str, int, int]:
    """Return a place in a client's region as the front gets it."""
    return one.region, one.offset, one.nbytes


class IngressLoans:
    """Memory lent to an ingress process and by it, until ``close``; a ``Borrower``."""

    def __init__(self, channel: IpcChannel) -> None:
        self._channel = channel
        self._memory = OutputMemory()
        self._numbers = itertools.count(1)
        #: Callbacks for the end of each lease.
        self._leased: dict[int, Callable[[], None]] = {}
        self._freed: list[tuple[int, int]] = []
        self._is_closed = False
        self.on_close: list[Callable[[Any], None]] = []
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            messages.LeasesClosed: self._on_closed,
            wire.DropSegment: lambda message: self._memory.detach(message.segment),
        }

    @property
    def n_leased(self) -> int:
        """Return the number of open leases."""
        return len(self._leased)

    # ---- from the ingress process ------------------------------------------------------------------------

    def attach(self, message: wire.Segment, fds: list[int]) -> None:
        """Map a segment of the arena of the ingress process. The caller keeps its descriptor."""
        self._memory.attach(message.segment, fds[0], message.nbytes)

    def input_at(self, segment: int, offset: int, nbytes: int) -> LentBlock:
        """Return an input in the arena of the ingress process as a block that workers can read."""
        return self._memory.lend_block(segment, offset, nbytes, partial(self._free, (segment, offset)))

    def _free(self, place: tuple[int, int]) -> None:
        if self._is_closed:
            return
        if not self._freed:
            self._channel.call_at_end(self._send_freed)
        self._freed.append(place)

    def _send_freed(self) -> None:
        freed, self._freed = self._freed, []
        self._channel.post(wire.Free(tuple(freed)))

    # ---- from workers -------------------------------------------------------------------------

    def describe(self, response: InferResponse, output: OutputTensor) -> Any:
        """Return an output as the ingress process gets it: its bytes, a place in a lent segment, or None."""
        data, memory = output.data, response.memory
        if output.placed:
            return None
        if isinstance(data, bytes):
            return data
        if memory is not None and len(data) > wire.INLINE_NBYTES:
            place = memory.locate(data)
            if place is not None:
                return self.place(place.memory, wire.Ref(place.segment, place.offset, len(data)))
        return bytes(data)

    def place(self, memory: OutputMemory, at: wire.Payload) -> tuple[int, int, int]:
        """Return a place in a worker's arena as the ingress process knows it."""
        assert isinstance(at, wire.Ref), "an output outside the message lies in the worker's arena"
        return memory.lend(*at, self)[:3]

    def lease(self, on_close: Callable[[], None]) -> int:
        """Return the number of a lease, whose end calls ``on_close``: at once if the process is gone."""
        lease = next(self._numbers)
        if self._is_closed:
            on_close()
            return lease
        self._leased[lease] = on_close
        return lease

    def next_loan(self) -> int:
        return next(self._numbers)

    def send(self, message: wire.Lend | wire.Unlend, fds: Sequence[int] = ()) -> None:
        if fds:
            self._channel.send(message, fds)
        else:
            self._channel.post(message)

    def _on_closed(self, message: messages.LeasesClosed) -> None:
        for lease in message.leases:
            self._leased.pop(lease)()

    def close(self) -> None:
        """Return all lent memory, because the ingress process is gone."""
        self._is_closed = True
        while self._leased:
            self._leased.popitem()[1]()
        for callback in tuple(self.on_close):
            callback(self)
        self._memory.close()
