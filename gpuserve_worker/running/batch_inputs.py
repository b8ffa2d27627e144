"""The inputs of a batch before its callable is called, and what is copied in from clients' regions of shared
memory. A client that spoils its own region loses its own request: its rows are zeros (empty strings) for the
callable, so that the others of the batch run, and its answer is a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from gpuserve_worker.calling.outputs import BatchAnswers
from gpuserve_worker.calling.request import Batch
from gpuserve_worker.memory.arena import Mapping
from gpuserve_worker.memory.regions import ClientRegions, RegionError
from gpuserve_worker.protocol.payloads import REGION, Fill, Loan, Place, WireFailure, payload
from gpuserve_worker.protocol.tensor import BYTES, check_bytes
from gpuserve_worker.protocol.wire import Run

if TYPE_CHECKING:
    from gpuserve_worker.running.device_path import Arrival

_BOOL: Final = "BOOL"
_LENGTH_NBYTES: Final = 4
_LONGEST_NBYTES: Final = 0xFFFF_FFFF
_HANDED_OVER: Final = Batch({}, (), (), False)


class BatchInputs:
    """A batch as arrays, and its requests. ``failures`` are those that are refused, by position; ``in_place``
    are the places in regions that the arrays are over. ``arrival`` is there where inputs are on their way to
    a device: the callable is called after ``admit()``.
    """

    __slots__ = ("arrival", "batch", "failures", "in_place", "requests")

    def __init__(
        self,
        batch: Batch,
        failures: dict[int, WireFailure],
        in_place: tuple[Place, ...],
        arrival: Arrival | None = None,
    ) -> None:
        self.batch = batch
        self.requests = batch.requests
        self.failures = failures
        self.in_place = in_place
        self.arrival = arrival

    def admit(self) -> None:
        """Let what goes into the default stream from now on find the inputs on the device; does not wait."""
        if self.arrival is not None:
            self.arrival.admit()

    def hand_over(self) -> Batch:
        """The batch for the callable. Nobody else refers to its arrays from now on, so that an answer that is
        one of them is told from one that is kept.
        """
        batch, self.batch = self.batch, _HANDED_OVER
        return batch

    def refusals(self) -> BatchAnswers | None:
        """The answers to a batch of which no request is left; None where one is."""
        count = len(self.requests)
        if len(self.failures) < count:
            return None
        return BatchAnswers(None, [self.failures[position] for position in range(count)])


def fill_all(run: Run, mapping: Mapping, regions: ClientRegions, loans: Mapping) -> dict[int, WireFailure]:
    """Copy what the batch needs from regions into the front's arena: the requests for which that failed.
    Raises ``ValueError`` or ``KeyError`` where the front named memory that there is not.
    """
    failures: dict[int, WireFailure] = {}
    begun: list[tuple[Fill, memoryview]] = []
    for raw in run.fills:
        one = Fill(*raw)
        source = payload(one.source)
        target = mapping.view(one.segment, one.offset, one.source[2])
        if isinstance(source, Loan):
            target[:] = loans.view(*source[:3])
            continue
        assert isinstance(source, Place)
        try:
            if regions[source.region].begin_read(source, target):
                begun.append((one, target))
                continue
            problem = problem_of(one.datatype, one.elements, target)
        except RegionError as error:
            problem = str(error)
        _judge(one, target, problem, failures)
    if begun:
        _end_fills(begun, regions, failures)
    return failures


def _end_fills(
    begun: list[tuple[Fill, memoryview]], regions: ClientRegions, failures: dict[int, WireFailure]
) -> None:
    """Wait for the copies from a device, which are all under way, and look at what they brought."""
    lost = ""
    try:
        regions.end_reads()
    except RegionError as error:
        lost = str(error)
    for one, target in begun:
        problem = lost or problem_of(one.datatype, one.elements, target)
        _judge(one, target, problem, failures)


def _judge(one: Fill, target: memoryview, problem: str | None, failures: dict[int, WireFailure]) -> None:
    """A request of which a copy is no good is refused, and the others of its batch run beside zeros."""
    if problem is not None:
        failures[one.position] = WireFailure("INVALID_ARGUMENT", problem)
        _neutralise(target, one)


def places_of(run: Run) -> tuple[Place, ...]:
    """The places in regions that the inputs of a batch are read from without a copy."""
    payloads = [one[3] for one in run.inputs]
    return tuple(
        [Place(*one) for one in payloads if not isinstance(one, bytes) and len(one) > 3 and one[3] == REGION]
    )


def problem_of(datatype: str, elements: int, target: memoryview) -> str | None:
    """What is wrong with the copy of an input of so many elements; None where nothing is."""
    if datatype == BYTES:
        problem = check_bytes(target, elements)
        return None if problem is None else f"a BYTES input in shared memory is malformed: {problem}"
    if datatype == _BOOL and np.frombuffer(target, np.uint8).max(initial=0) > 1:
        return "a BOOL input in shared memory holds other bytes than 0 and 1"
    return None


def _neutralise(target: memoryview, one: Fill) -> None:
    """Zeros, as many as there were; of BYTES, as many elements, the first of which take all the bytes."""
    np.frombuffer(target, np.uint8)[:] = 0
    if one.datatype != BYTES:
        return
    position, left = 0, len(target) - _LENGTH_NBYTES * one.elements
    while left:
        length = min(left, _LONGEST_NBYTES)
        target[position : position + _LENGTH_NBYTES] = length.to_bytes(_LENGTH_NBYTES, "little")
        position += _LENGTH_NBYTES + length
        left -= length
