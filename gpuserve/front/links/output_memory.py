"""A worker's output arena as the front sees it: mapped, and lent segment by segment to other workers, so that
what one model gave another takes without a copy. The arena of an ensemble's own inputs is lent alike. The
front allocates nothing here and frees nothing; a block goes back to its worker by ``wire.Free``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpuserve_worker.memory.arena import Block, Mapping
from gpuserve_worker.memory.orphans import LENT_BLOCK, ORPHANS
from gpuserve_worker.protocol.wire import DeviceLoan, Lend, Loan, Unlend


class Borrower(Protocol):
    """Another process that is lent segments: a worker, or a door."""

    #: Called when it is gone.
    on_close: list[Callable[[Any], None]]

    def next_loan(self) -> int:
        """The number that it will know the next segment by."""

    def send(self, message: Lend | Unlend, fds: Sequence[int] = ()) -> None:
        """Tell it of a segment, or that nothing will refer to one any more."""


class LentSegment(ABC):
    """A segment that can be lent, and the workers that have it; it goes with its last block on the way."""

    __slots__ = ("_holders", "_is_given_up", "_lent", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lent: dict[Borrower, int] = {}
        self._holders = 0
        self._is_given_up = False

    def number_for(self, borrower: Borrower) -> int:
        number = self._lent.get(borrower)
        if number is None:
            number = self._lent[borrower] = borrower.next_loan()
            borrower.on_close.append(self._forget)
            self._introduce(borrower, number)
        return number

    @abstractmethod
    def lend(
        self, offset: int, nbytes: int, borrower: Borrower, *, in_place: bool = False
    ) -> Loan | DeviceLoan:
        """A place in it, as another worker will know it; ``in_place``: nobody minds what it does to it."""

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        self._close_if_unused()

    def give_up(self) -> None:
        """Close it as soon as no block in it is on its way: its owner has no use for it any more."""
        self._is_given_up = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._holders or not self._is_given_up:
            return
        while self._lent:
            borrower, number = self._lent.popitem()
            borrower.on_close.remove(self._forget)
            self._take_leave(borrower, number)
        self._close()

    def _forget(self, borrower: Borrower) -> None:
        self._lent.pop(borrower, None)

    @abstractmethod
    def _introduce(self, borrower: Borrower, number: int) -> None:
        """Tell a worker of the segment and of the number that it has there."""

    @abstractmethod
    def _take_leave(self, borrower: Borrower, number: int) -> None:
        """Tell a worker that nothing will refer to it any more."""

    def _close(self) -> None:  # noqa: B027 - not every kind has something to close
        """Release what this kind of memory holds of the segment."""


class _SharedSegment(LentSegment):
    """A segment of shared memory: a descriptor of its own, and the ``address`` of ``nbytes`` mapped bytes."""

    __slots__ = ("_fd", "address")

    def __init__(self, fd: int, address: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self.address = address
        self._fd = os.dup(fd)

    def lend(self, offset: int, nbytes: int, borrower: Borrower, *, in_place: bool = False) -> Loan:
        return Loan(self.number_for(borrower), offset, nbytes)

    def _introduce(self, borrower: Borrower, number: int) -> None:
        borrower.send(Lend(number, self.nbytes), [self._fd])

    def _take_leave(self, borrower: Borrower, number: int) -> None:
        borrower.send(Unlend(number))

    def _close(self) -> None:
        os.close(self._fd)


class Located(NamedTuple):
    """Where a view begins: in which memory, in which of its segments, at which offset."""

    memory: OutputMemory
    segment: int
    offset: int


class OutputMemory(Mapping):
    """The segments of one arena, mapped into the front; places are (segment, offset), in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[int, _SharedSegment] = {}

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._segments.values())

    def attach(self, segment: int, fd: int, nbytes: int) -> None:
        """Map a segment; ``fd`` stays the caller's. Raises as ``Mapping.attach``."""
        super().attach(segment, fd, nbytes)
        self._segments[segment] = _SharedSegment(fd, _address(self.view(segment, 0, nbytes)), nbytes)

    def detach(self, segment: int) -> None:
        """Its owner gave a segment up: nobody will be referred to it again, but for blocks on their way."""
        self._segments.pop(segment).give_up()
        super().detach(segment)

    def lend(self, segment: int, offset: int, nbytes: int, borrower: Borrower) -> Loan:
        """A place in a segment, as another worker will know it; KeyError: there is no such segment."""
        return self._segments[segment].lend(offset, nbytes, borrower)

    def lent(
        self, segment: int, offset: int, nbytes: int, on_free: Callable[[], None], *, shared: bool = False
    ) -> LentBlock:
        """Bytes of a segment for one reader; ValueError: they are not inside of a segment that there is."""
        view = self.view(segment, offset, nbytes)
        return LentBlock(self._segments[segment], segment, offset, view, on_free, shared=shared)

    def locate(self, view: memoryview) -> Located | None:
        """The place that a view of this memory begins at."""
        address = _address(view)
        for number, one in self._segments.items():
            if one.address <= address < one.address + one.nbytes:
                return Located(self, number, address - one.address)
        return None


class Memories:
    """The memories that the outputs of one response lie in, where several workers made them."""

    def __init__(self, memories: Iterable[OutputMemory | Memories]) -> None:
        self._memories = tuple(memories)

    def locate(self, view: memoryview) -> Located | None:
        for one in self._memories:
            if (found := one.locate(view)) is not None:
                return found
        return None


class LentBlock(Block):
    """Bytes in a worker's output arena, on their way to a worker of another model. ``shared``: others read
    them too, so whoever may write to its inputs must be given a copy.
    """

    __slots__ = ("_lender", "_on_free", "shared")

    memory_kind = LENT_BLOCK

    def __init__(
        self,
        lender: LentSegment,
        segment: int,
        offset: int,
        view: memoryview,
        on_free: Callable[[], None],
        *,
        shared: bool,
    ) -> None:
        super().__init__(segment, offset, len(view), view)
        self.shared = shared
        self._lender = lender
        self._on_free: Callable[[], None] | None = on_free
        lender.hold()

    def __del__(self) -> None:
        if self._on_free is not None:
            ORPHANS.add(self)

    def lend(self, borrower: Borrower, *, in_place: bool = False) -> Loan | DeviceLoan:
        """The same bytes, as another worker will know them; ``in_place``: it may do with them as it likes."""
        return self._lender.lend(self.offset, self.nbytes, borrower, in_place=in_place)

    def again(self, on_free: Callable[[], None], *, shared: bool) -> LentBlock:
        """The same bytes, lent to one more reader."""
        shared = shared or self.shared
        return LentBlock(self._lender, self.segment, self.offset, self.view[:], on_free, shared=shared)

    def free(self) -> None:
        on_free, self._on_free = self._on_free, None
        if on_free is not None:
            self.view.release()
            self._lender.let_go()
            on_free()


def _address(view: memoryview) -> int:
    array: Any = np.frombuffer(view, np.uint8)
    return int(array.ctypes.data)
