"""The memory that one door and the workers have in common, as the front sees it: the door's arena is lent to
workers block by block, and segments of workers' arenas to the door. The front reads none of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gpuserve.front.links.output_memory import LentBlock, OutputMemory
from gpuserve.front.passage import messages
from gpuserve.front.passage.passage import Passage
from gpuserve.front.requests.inference import InferResponse, OutputTensor
from gpuserve_worker.protocol import wire


class DoorLoans:
    """What is lent to a door and by it, until ``close``; a ``Borrower``. ``obey`` says who takes which
    message of the door.
    """

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
        self._memory = OutputMemory()
        self._numbers = itertools.count(1)
        #: What is called when the door has closed the responses of a lease.
        self._leased: dict[int, Callable[[], None]] = {}
        self._freed: list[tuple[int, int]] = []
        self._is_closed = False
        self.on_close: list[Callable[[Any], None]] = []
        self.obey: Mapping[type, Callable[[Any], None]] = {
            messages.Closed: self._on_closed,
            messages.DropDoorSegment: lambda message: self._memory.detach(message.segment),
        }

    @property
    def n_leased(self) -> int:
        """How many leases the door has not closed yet."""
        return len(self._leased)

    # ---- the door's ---------------------------------------------------------------------------

    def attach(self, message: messages.DoorSegment, fds: list[int]) -> None:
        """Map a segment of the door's arena; its descriptor stays the caller's."""
        self._memory.attach(message.segment, fds[0], message.nbytes)

    def input_at(self, segment: int, offset: int, nbytes: int) -> LentBlock:
        """An input in the door's arena, as workers can read it."""
        return self._memory.lent(segment, offset, nbytes, partial(self._free, (segment, offset)))

    def _free(self, place: tuple[int, int]) -> None:
        if self._is_closed:
            return
        if not self._freed:
            self._passage.call_at_end(self._say_freed)
        self._freed.append(place)

    def _say_freed(self) -> None:
        freed, self._freed = self._freed, []
        self._passage.post(messages.Freed(tuple(freed)))

    # ---- the workers' -------------------------------------------------------------------------

    def told(self, response: InferResponse, output: OutputTensor) -> Any:
        """An output as the door is told of it: its bytes, a place in a segment that it was lent, or None."""
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
        """A place in a worker's arena, as the door will know it."""
        assert isinstance(at, wire.Ref), "what is not in the message lies in the worker's arena"
        return memory.lend(*at, self)[:3]

    def lease(self, on_close: Callable[[], None]) -> int:
        """The number of a lease, at whose end ``on_close`` is called: at once if the door is gone."""
        lease = next(self._numbers)
        if self._is_closed:
            on_close()
            return lease
        self._leased[lease] = on_close
        return lease

    def next_loan(self) -> int:
        return next(self._numbers)

    def send(self, message: wire.Lend | wire.Unlend, fds: Sequence[int] = ()) -> None:
        if isinstance(message, wire.Lend):
            self._passage.send(messages.LendSegment(*message), fds)
        else:
            self._passage.post(messages.UnlendSegment(*message))

    def _on_closed(self, message: messages.Closed) -> None:
        for lease in message.leases:
            self._leased.pop(lease)()

    def close(self) -> None:
        """The door is gone: what it was lent goes back, and what it lent is nobody's."""
        self._is_closed = True
        while self._leased:
            self._leased.popitem()[1]()
        for callback in tuple(self.on_close):
            callback(self)
        self._memory.close()
