"""Memory of workers as the front sees it: output arenas on the host, and tensors kept on devices.

The front maps a worker's output arena, and lends its segments to other workers, so that a model's outputs
become another model's inputs without a copy. The arena of an ensemble's own inputs is lent alike. The front
allocates and frees nothing in an output arena; ``wire.Free`` returns a block to its worker.

A tensor kept on a device has no view in the front, which knows nothing of CUDA: it forwards handles as bytes.
The front learns which workers can read each other's devices::

    pair of workers   unknown ──StartExports, LendExport──► asked ──ExportOpened──► reached
                                                              └──(with a problem)──► out of reach

A kept tensor is lent only if all workers that may have to read it have opened a segment of its worker before.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from gpuserve.front.requests.inference import OutputTensor
from gpuserve_worker.memory.arena import LENT_BLOCK, ORPHANS, Block, Mapping
from gpuserve_worker.protocol.tensor import ITEMSIZE, element_count
from gpuserve_worker.protocol.wire import (
    INLINE_NBYTES,
    DeviceLoan,
    Exported,
    ExportOpened,
    ExportSegment,
    Lend,
    LendExport,
    Loan,
    Message,
    StartExports,
    Unlend,
    UnlendExport,
)


class Borrower(Protocol):
    """A process that borrows segments: a worker, or an ingress process."""

    #: Called when the process is gone.
    on_close: list[Callable[[Any], None]]

    def next_loan(self) -> int:
        """Return the number by which the process will know the next segment."""

    def send(self, message: Lend | Unlend, fds: Sequence[int] = ()) -> None:
        """Announce a segment to the process, or withdraw it."""


class DevicePeer(Borrower, Protocol):
    """A worker that keeps tensors on its device for other workers, or reads the tensors that they keep."""

    instance: str
    device: str
    exports: Exports

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message to the worker."""


class LentSegment(ABC):
    """A segment to lend. It closes once its owner gave it up and the last lent block is free."""

    __slots__ = ("_holders", "_is_closing", "_lent", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lent: dict[Borrower, int] = {}
        self._holders = 0
        self._is_closing = False

    def number_for(self, borrower: Borrower) -> int:
        number = self._lent.get(borrower)
        if number is None:
            number = self._lent[borrower] = borrower.next_loan()
            borrower.on_close.append(self._forget)
            self._announce(borrower, number)
        return number

    @abstractmethod
    def lend(
        self, offset: int, nbytes: int, borrower: Borrower, *, in_place: bool = False
    ) -> Loan | DeviceLoan:
        """Return a place as the borrower knows it. ``in_place``: the borrower may modify the bytes."""

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        self._close_if_unused()

    def close_when_unused(self) -> None:
        """Close the segment as soon as no lent block refers to it."""
        self._is_closing = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._holders or not self._is_closing:
            return
        while self._lent:
            borrower, number = self._lent.popitem()
            borrower.on_close.remove(self._forget)
            self._withdraw(borrower, number)
        self._close()

    def _forget(self, borrower: Borrower) -> None:
        self._lent.pop(borrower, None)

    @abstractmethod
    def _announce(self, borrower: Borrower, number: int) -> None:
        """Announce the segment and its number to a borrower."""

    @abstractmethod
    def _withdraw(self, borrower: Borrower, number: int) -> None:
        """Withdraw the segment from a borrower."""

    def _close(self) -> None:  # noqa: B027 - not every kind has something to close
        """Release what this kind of memory holds of the segment."""


class _SharedSegment(LentSegment):
    """A segment of shared memory: a duplicate descriptor, and the ``address`` of ``nbytes`` mapped bytes."""

    __slots__ = ("_fd", "address")

    def __init__(self, fd: int, address: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self.address = address
        self._fd = os.dup(fd)

    def lend(self, offset: int, nbytes: int, borrower: Borrower, *, in_place: bool = False) -> Loan:
        return Loan(self.number_for(borrower), offset, nbytes)

    def _announce(self, borrower: Borrower, number: int) -> None:
        borrower.send(Lend(number, self.nbytes), [self._fd])

    def _withdraw(self, borrower: Borrower, number: int) -> None:
        borrower.send(Unlend(number))

    def _close(self) -> None:
        os.close(self._fd)


class Located(NamedTuple):
    """The place at which a view begins: memory, segment, and offset."""

    memory: OutputMemory
    segment: int
    offset: int


class OutputMemory(Mapping):
    """The segments of one arena, mapped into the front. Places are (segment, offset), in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[int, _SharedSegment] = {}

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._segments.values())

    def attach(self, segment: int, fd: int, nbytes: int) -> None:
        """Map a segment. The caller keeps ``fd``. Raises as ``Mapping.attach``."""
        super().attach(segment, fd, nbytes)
        self._segments[segment] = _SharedSegment(fd, _address(self.view(segment, 0, nbytes)), nbytes)

    def detach(self, segment: int) -> None:
        """Drop a segment that its owner gave up. Lent blocks in it stay valid."""
        self._segments.pop(segment).close_when_unused()
        super().detach(segment)

    def lend(self, segment: int, offset: int, nbytes: int, borrower: Borrower) -> Loan:
        """Return a place as the borrower knows it. Raises KeyError if the segment does not exist."""
        return self._segments[segment].lend(offset, nbytes, borrower)

    def lend_block(
        self, segment: int, offset: int, nbytes: int, on_free: Callable[[], None], *, shared: bool = False
    ) -> LentBlock:
        """Return bytes of a segment as a block for one reader. Raises ValueError outside the segment."""
        view = self.view(segment, offset, nbytes)
        return LentBlock(self._segments[segment], segment, offset, view, on_free, shared=shared)

    def locate(self, view: memoryview) -> Located | None:
        """Return the place at which a view of this memory begins, or None."""
        address = _address(view)
        for number, one in self._segments.items():
            if one.address <= address < one.address + one.nbytes:
                return Located(self, number, address - one.address)
        return None


class Memories:
    """The memories of the outputs of one response, if several workers made them."""

    def __init__(self, memories: Iterable[OutputMemory | Memories]) -> None:
        self._memories = tuple(memories)

    def locate(self, view: memoryview) -> Located | None:
        for one in self._memories:
            if (found := one.locate(view)) is not None:
                return found
        return None


class LentBlock(Block):
    """Bytes of a worker's outputs, lent to another model; if ``shared``, writers must get a copy."""

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
        """Return the place as the borrower knows it. ``in_place``: the borrower may modify the bytes."""
        return self._lender.lend(self.offset, self.nbytes, borrower, in_place=in_place)

    def lend_again(self, on_free: Callable[[], None], *, shared: bool) -> LentBlock:
        """Return another block over the same bytes, for one more reader."""
        shared = shared or self.shared
        return LentBlock(self._lender, self.segment, self.offset, self.view[:], on_free, shared=shared)

    def free(self) -> None:
        on_free, self._on_free = self._on_free, None
        if on_free is not None:
            self.view.release()
            self._lender.release()
            on_free()


def _address(view: memoryview) -> int:
    array: Any = np.frombuffer(view, np.uint8)
    return int(array.ctypes.data)


logger = logging.getLogger(__name__)


class _DeviceSegment(LentSegment):
    """A segment of device memory, of ``nbytes`` bytes, behind a CUDA IPC ``handle``."""

    __slots__ = ("_handle", "_owner")

    def __init__(self, owner: Exports, nbytes: int, handle: bytes) -> None:
        super().__init__(nbytes)
        self._owner = owner
        self._handle = handle

    @property
    def device(self) -> str:
        return self._owner.device

    def lend(self, offset: int, nbytes: int, borrower: Borrower, *, in_place: bool = False) -> DeviceLoan:
        return DeviceLoan(self.number_for(borrower), offset, nbytes, in_place=in_place)

    def _announce(self, borrower: Borrower, number: int) -> None:
        worker = _worker(borrower)
        worker.exports.expect(number, self._owner)
        worker.send(LendExport(number, self.nbytes, self._handle))

    def _withdraw(self, borrower: Borrower, number: int) -> None:
        _worker(borrower).send(UnlendExport(number))

    def _forget(self, borrower: Borrower) -> None:
        super()._forget(borrower)
        self._owner.forget(_worker(borrower))


def _worker(borrower: Borrower) -> DevicePeer:
    """Return the borrower of device memory, which is always a worker."""
    return cast("DevicePeer", borrower)


class Exports:
    """The tensors that one worker keeps on its device for others, and its reports on others' tensors."""

    def __init__(self, link: DevicePeer) -> None:
        self._link = link
        self.device = link.device
        #: The answers of its worker with outputs on its device that are not freed yet.
        self.owed = 0
        self._segments: dict[int, _DeviceSegment] = {}
        self._is_started = False
        #: Whether these workers can read its device, as far as they have reported.
        self._readable_by: dict[DevicePeer, bool] = {}
        #: The owners of the segments that were lent to this worker, by number, until it reports whether it
        #: opened them.
        self._expected: dict[int, Exports] = {}

    def receive(self, message: ExportSegment | ExportOpened) -> None:
        """Process a worker's message about exports. Raises ValueError or KeyError if it is malformed."""
        if isinstance(message, ExportOpened):
            self._expected.pop(message.segment)._on_opened(self._link, message.problem)
            return
        segment, nbytes, handle = message
        if segment in self._segments or nbytes <= 0 or not isinstance(handle, bytes):
            raise ValueError(f"export segment {segment!r} of {nbytes!r} bytes")
        self._segments[segment] = _DeviceSegment(self, nbytes, handle)

    def is_readable_by(self, borrower: DevicePeer) -> bool:
        """Return whether a worker is known to read what this worker keeps. If unknown, ask the worker."""
        reached = self._readable_by.get(borrower)
        if reached is None:
            if not self._is_started:
                self._is_started = True
                self._link.send(StartExports())
            if self._segments:
                next(iter(self._segments.values())).number_for(borrower)
        return bool(reached)

    def kept_tensor(self, name: str, datatype: str, shape: tuple[int, ...], place: Exported) -> KeptTensor:
        """Return an output kept on the worker's device. Raises ValueError if its place or size is wrong."""
        segment = self._segments.get(place.segment)
        inside = segment is not None and min(place.offset, place.nbytes) >= 0
        if segment is None or not inside or place.offset + place.nbytes > segment.nbytes:
            raise ValueError(f"no {place.nbytes} bytes at {place.offset} of export segment {place.segment}")
        if place.nbytes != ITEMSIZE[datatype] * element_count(shape):
            raise ValueError(f"output {name!r} of shape {shape} has {place.nbytes} bytes of {datatype}")
        if place.nbytes <= INLINE_NBYTES:  # small outputs are inside the message
            raise ValueError(f"output {name!r} of {place.nbytes} bytes was kept, which is too small for that")
        return KeptTensor(name, datatype, shape, segment, place)

    def expect(self, number: int, owner: Exports) -> None:
        """Expect a report of this worker whether it could open a segment."""
        self._expected[number] = owner

    def forget(self, borrower: DevicePeer) -> None:
        self._readable_by.pop(borrower, None)

    def close(self) -> None:
        self._expected.clear()
        while self._segments:
            self._segments.popitem()[1].close_when_unused()

    def _on_opened(self, borrower: DevicePeer, problem: str) -> None:
        if problem and self._readable_by.get(borrower, True):
            logger.info(
                "instance %s cannot read what instance %s keeps on its device, so tensors between them go by "
                "the host: %s",
                borrower.instance,
                self._link.instance,
                problem,
            )
        self._readable_by[borrower] = not problem and self._readable_by.get(borrower, True)


class KeptTensor(OutputTensor):
    """An output that its worker kept on the device; ``data`` is empty."""

    __slots__ = ("_place", "_segment")

    def __init__(
        self, name: str, datatype: str, shape: tuple[int, ...], segment: _DeviceSegment, place: Exported
    ) -> None:
        super().__init__(name, datatype, shape, b"")
        self._segment = segment
        self._place = place

    @property
    def nbytes(self) -> int:
        return self._place.nbytes

    def lend_block(self, on_free: Callable[[], None], *, shared: bool) -> LentExport:
        """Return the bytes on the device as a block for one reader."""
        return LentExport(self._segment, self._place, on_free, shared=shared)


class LentExport(LentBlock):
    """Bytes on the device of one worker, lent to another. The front has no view of them."""

    __slots__ = ("device",)

    def __init__(
        self, lender: _DeviceSegment, place: Exported, on_free: Callable[[], None], *, shared: bool
    ) -> None:
        super().__init__(lender, place.segment, place.offset, memoryview(b""), on_free, shared=shared)
        self.nbytes = place.nbytes
        self.device = lender.device


def all_can_read(owners: Iterable[DevicePeer], borrowers: Iterable[DevicePeer]) -> bool:
    """Return whether each of the borrowers can read what all of the owners keep. Unknown pairs are probed."""
    there = list(borrowers)
    answers = [owner.exports.is_readable_by(borrower) for owner in owners for borrower in there]
    return bool(answers) and all(answers)
