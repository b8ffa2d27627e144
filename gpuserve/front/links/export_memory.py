"""What a worker keeps on its device for others, as the front sees it: where it lies, and which workers can
read it. The front has no view of it and knows nothing of CUDA: handles are bytes, which it passes on.

::

    pair of workers   unknown ──StartExports, LendExport──► asked ──ExportOpened──► reached
                                                              └──(with a problem)──► out of reach

What one worker kept is lent to another only where all who may be asked to read it have opened some of it
before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from gpuserve.front.links.output_memory import Borrower, LentBlock, LentSegment
from gpuserve.front.requests.inference import OutputTensor
from gpuserve_worker.protocol.tensor import ITEMSIZE, element_count
from gpuserve_worker.protocol.wire import (
    INLINE_NBYTES,
    DeviceLoan,
    Exported,
    ExportOpened,
    ExportSegment,
    LendExport,
    StartExports,
    UnlendExport,
)

if TYPE_CHECKING:
    from gpuserve.front.links.worker_link import WorkerLink

logger = logging.getLogger(__name__)


class _DeviceSegment(LentSegment):
    """One segment of a device's memory, of ``nbytes`` bytes, behind a CUDA IPC ``handle``."""

    __slots__ = ("_handle", "_owner")

    def __init__(self, owner: Exports, nbytes: int, handle: bytes) -> None:
        super().__init__(nbytes)
        self._owner = owner
        self._handle = handle

    def lend(self, offset: int, nbytes: int, borrower: Borrower, *, in_place: bool = False) -> DeviceLoan:
        return DeviceLoan(self.number_for(borrower), offset, nbytes, in_place=in_place)

    def _introduce(self, borrower: Borrower, number: int) -> None:
        worker = _worker(borrower)
        worker.exports.expect(number, self._owner)
        worker.send(LendExport(number, self.nbytes, self._handle))

    def _take_leave(self, borrower: Borrower, number: int) -> None:
        _worker(borrower).send(UnlendExport(number))

    def _forget(self, borrower: Borrower) -> None:
        super()._forget(borrower)
        self._owner.forget(_worker(borrower))


def _worker(borrower: Borrower) -> WorkerLink:
    """Who borrows memory of a device, which is always a worker."""
    return cast("WorkerLink", borrower)


class Exports:
    """What one worker keeps for others, and its answers about what others keep."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        #: Answers of its worker with outputs on its device that are not given back yet.
        self.owed = 0
        self._segments: dict[int, _DeviceSegment] = {}
        self._is_started = False
        #: Whether these workers can read it, as far as they have said so.
        self._reached: dict[WorkerLink, bool] = {}
        #: Whose segments this worker was lent under these numbers, and has not said whether it could open.
        self._expected: dict[int, Exports] = {}

    def take(self, message: ExportSegment | ExportOpened) -> None:
        """Take what the worker says of its or others' exports; ValueError, KeyError: it makes no sense."""
        if isinstance(message, ExportOpened):
            self._expected.pop(message.segment)._answered(self._link, message.problem)
            return
        segment, nbytes, handle = message
        if segment in self._segments or nbytes <= 0 or not isinstance(handle, bytes):
            raise ValueError(f"export segment {segment!r} of {nbytes!r} bytes")
        self._segments[segment] = _DeviceSegment(self, nbytes, handle)

    def reach(self, borrower: WorkerLink) -> bool:
        """Whether a worker is known to read what this one keeps; where that is unknown, it is asked."""
        reached = self._reached.get(borrower)
        if reached is None:
            self._ask(borrower)
        return bool(reached)

    def kept(self, name: str, datatype: str, shape: tuple[int, ...], place: Exported) -> KeptTensor:
        """An output kept on the worker's device; ValueError: it is not inside of a segment, or too long."""
        segment = self._segments.get(place.segment)
        inside = segment is not None and min(place.offset, place.nbytes) >= 0
        if segment is None or not inside or place.offset + place.nbytes > segment.nbytes:
            raise ValueError(f"no {place.nbytes} bytes at {place.offset} of export segment {place.segment}")
        if place.nbytes != ITEMSIZE[datatype] * element_count(shape):
            raise ValueError(f"output {name!r} of shape {shape} has {place.nbytes} bytes of {datatype}")
        if place.nbytes <= INLINE_NBYTES:  # which would be looked for in a message
            raise ValueError(f"output {name!r} of {place.nbytes} bytes was kept, which is too small for that")
        return KeptTensor(name, datatype, shape, segment, place)

    def expect(self, number: int, owner: Exports) -> None:
        """Remember that this worker is going to say whether it could open a segment."""
        self._expected[number] = owner

    def forget(self, borrower: WorkerLink) -> None:
        self._reached.pop(borrower, None)

    def close(self) -> None:
        self._expected.clear()
        while self._segments:
            self._segments.popitem()[1].give_up()

    def _ask(self, borrower: WorkerLink) -> None:
        if not self._is_started:
            self._is_started = True
            self._link.send(StartExports())
        if self._segments:
            next(iter(self._segments.values())).number_for(borrower)

    def _answered(self, borrower: WorkerLink, problem: str) -> None:
        if problem and self._reached.get(borrower, True):
            logger.info(
                "instance %s cannot read what instance %s keeps on its device, so tensors between them go by "
                "the host: %s",
                borrower.instance,
                self._link.instance,
                problem,
            )
        self._reached[borrower] = not problem and self._reached.get(borrower, True)


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

    def lent(self, on_free: Callable[[], None], *, shared: bool) -> LentExport:
        """The same bytes on the device, lent to one reader."""
        return LentExport(self._segment, self._place, on_free, shared=shared)


class LentExport(LentBlock):
    """Bytes on the device of one worker, on their way to another. There is no view of them."""

    __slots__ = ()

    def __init__(
        self, lender: _DeviceSegment, place: Exported, on_free: Callable[[], None], *, shared: bool
    ) -> None:
        super().__init__(lender, place.segment, place.offset, memoryview(b""), on_free, shared=shared)
        self.nbytes = place.nbytes


def all_reach(owners: Iterable[WorkerLink], borrowers: Iterable[WorkerLink]) -> bool:
    """Whether what any of these workers keeps can be read by each of those; who is unknown is asked."""
    there = list(borrowers)
    answers = [owner.exports.reach(borrower) for owner in owners for borrower in there]
    return bool(answers) and all(answers)
