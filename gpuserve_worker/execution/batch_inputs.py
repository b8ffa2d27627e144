"""The inputs of a batch before the call: copies from clients' regions of shared memory, refused requests, and
the split of a batch that was too large for its device.

A client that spoils its own region fails its own request: the callable gets zeros (or empty strings) for its
rows, so that the other requests of the batch run, and the response is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.memory.arena import Mapping
from gpuserve_worker.memory.client_regions import ClientRegions, RegionError
from gpuserve_worker.protocol.payloads import REGION, Fill, Loan, Place, WireFailure, payload
from gpuserve_worker.protocol.tensor import BYTES, check_bytes
from gpuserve_worker.protocol.wire import Run

_BOOL: Final = "BOOL"
_LENGTH_NBYTES: Final = 4
_LONGEST_NBYTES: Final = 0xFFFF_FFFF
_HANDED_OVER: Final = Batch({}, (), (), False)


class Arrival(Protocol):
    """The transfer of a batch's inputs to a device."""

    def admit(self) -> None:
        """Order later device work of this thread after the arrival of the inputs. Does not block."""


class BatchInputs:
    """The arrays of a batch, and its requests. ``failures`` are the refused requests by position;
    ``in_place`` are the regions' places under the arrays. If ``arrival`` is given, inputs are in transfer to
    a device, and ``admit()`` must precede the call.
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
        """Order later work of the default stream after the inputs' arrival, without blocking."""
        if self.arrival is not None:
            self.arrival.admit()

    def detach_batch(self) -> Batch:
        """Return the batch for the callable and drop this object's reference to its arrays. An output that is
        one of the inputs can then be distinguished from an array that the callable keeps.
        """
        batch, self.batch = self.batch, _HANDED_OVER
        return batch

    def refusals(self) -> BatchAnswers | None:
        """Return the failures of a batch whose requests are all refused, or None if a request is left."""
        count = len(self.requests)
        if len(self.failures) < count:
            return None
        return BatchAnswers(None, [self.failures[position] for position in range(count)])


def copy_fills(run: Run, mapping: Mapping, regions: ClientRegions, loans: Mapping) -> dict[int, WireFailure]:
    """Copy the batch's inputs from regions and loans into the front's arena. Return the failures of requests
    by position. Raise ``ValueError`` or ``KeyError`` if the front named unknown memory.
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
            if regions[source.region].start_read(source, target):
                begun.append((one, target))
                continue
            problem = input_defect(one.datatype, one.elements, target)
        except RegionError as error:
            problem = str(error)
        _refuse_if_defective(one, target, problem, failures)
    if begun:
        _end_fills(begun, regions, failures)
    return failures


def _end_fills(
    begun: list[tuple[Fill, memoryview]], regions: ClientRegions, failures: dict[int, WireFailure]
) -> None:
    """Wait for the started copies from a device and check the copied bytes."""
    lost = ""
    try:
        regions.wait_reads()
    except RegionError as error:
        lost = str(error)
    for one, target in begun:
        problem = lost or input_defect(one.datatype, one.elements, target)
        _refuse_if_defective(one, target, problem, failures)


def _refuse_if_defective(
    one: Fill, target: memoryview, problem: str | None, failures: dict[int, WireFailure]
) -> None:
    """Refuse a request whose copy is invalid, and put zeros in the place of its rows."""
    if problem is not None:
        failures[one.position] = WireFailure("INVALID_ARGUMENT", problem)
        _zero_fill(target, one)


def in_place_regions(run: Run) -> tuple[Place, ...]:
    """Return the places in regions from which inputs of a batch are read without a copy."""
    payloads = [one[3] for one in run.inputs]
    return tuple(
        [Place(*one) for one in payloads if not isinstance(one, bytes) and len(one) > 3 and one[3] == REGION]
    )


def input_defect(datatype: str, elements: int, target: memoryview) -> str | None:
    """Return the defect in a copied input of this number of elements, or None."""
    if datatype == BYTES:
        problem = check_bytes(target, elements)
        return None if problem is None else f"a BYTES input in shared memory is malformed: {problem}"
    if datatype == _BOOL and np.frombuffer(target, np.uint8).max(initial=0) > 1:
        return "a BOOL input in shared memory holds other bytes than 0 and 1"
    return None


def _zero_fill(target: memoryview, one: Fill) -> None:
    """Fill a range with zeros; for BYTES with as many elements, of which the first take all bytes."""
    np.frombuffer(target, np.uint8)[:] = 0
    if one.datatype != BYTES:
        return
    position, left = 0, len(target) - _LENGTH_NBYTES * one.elements
    while left:
        length = min(left, _LONGEST_NBYTES)
        target[position : position + _LENGTH_NBYTES] = length.to_bytes(_LENGTH_NBYTES, "little")
        position += _LENGTH_NBYTES + length
        left -= length


class BatchPart(NamedTuple):
    """Some adjacent requests of a batch, as a batch of their own."""

    run: Run
    inputs: BatchInputs


def split_position(rows: Sequence[int]) -> int:
    """Return the number of requests in the first of two parts that minimises the rows of the larger part."""
    total, before = sum(rows), 0
    larger = []
    for count in rows[:-1]:
        before += count
        larger.append(max(before, total - before))
    return larger.index(min(larger)) + 1 if larger else len(rows)


def split_batch(run: Run, inputs: BatchInputs) -> list[BatchPart]:
    """Return the two parts of a batch with several requests, or the batch itself if it has one."""
    count = len(run.requests)
    if count == 1 or not inputs.batch.batching:
        return [BatchPart(run, inputs)]
    position = split_position(inputs.batch.rows)
    return [_part(run, inputs, 0, position), _part(run, inputs, position, count)]


def join_answers(
    parts: Sequence[BatchPart], answers: Sequence[BatchAnswers | WireFailure]
) -> BatchAnswers | WireFailure:
    """Return the joined responses of the parts, or one failure if every part failed."""
    first = answers[0]
    if len(answers) == 1 or all(isinstance(one, WireFailure) for one in answers):
        return first
    each: list[list[CheckedOutput] | WireFailure | None] = []
    parameters: list[dict[str, Any]] = []
    for part, one in zip(parts, answers, strict=True):
        count = len(part.run.requests)
        if isinstance(one, WireFailure):
            each += [one] * count
        else:
            assert one.each is not None, "parts are checked with their requests apart"
            each += one.each
        given = () if isinstance(one, WireFailure) else one.parameters
        parameters += given or [{}] * count
    sources = tuple({place for one in answers if isinstance(one, BatchAnswers) for place in one.sources})
    return BatchAnswers(None, each, tuple(parameters) if any(parameters) else (), sources)


def _part(run: Run, inputs: BatchInputs, start: int, end: int) -> BatchPart:
    whole = inputs.batch
    rows = slice(sum(whole.rows[:start]), sum(whole.rows[:end]))
    arrays = {
        name: array[start:end] if name in whole.ragged.inputs else array[rows]
        for name, array in whole.arrays.items()
    }
    batch = Batch(arrays, whole.requests[start:end], whole.output_names, whole.batching, whole.ragged)
    failures = {at - start: one for at, one in inputs.failures.items() if start <= at < end}
    return BatchPart(
        run._replace(
            requests=run.requests[start:end],
            request_ids=run.request_ids[start:end],
            traces=run.traces[start:end],
        ),
        BatchInputs(batch, failures, inputs.in_place, inputs.arrival),
    )
