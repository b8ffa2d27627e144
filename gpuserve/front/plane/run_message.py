"""A batch as its worker is told of it: the ``Run`` message, and what must have been said before it.

Where the tensors are is decided in ``gather.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gpuserve.front.endpoint.v2 import InferRequest, RegionSlice
from gpuserve.front.links import WorkerLink
from gpuserve.front.plane.gather import Gathered
from gpuserve_worker.wire import Place, Run, WireRequest


class RegionUse(Protocol):
    """The regions that clients registered, as those see them who send requests that name some."""

    def introduce(self, link: WorkerLink, numbers: Iterable[int]) -> None:
        """Make sure that a worker knows these regions."""

    def unpin(self, request: InferRequest) -> None:
        """The request is through with the regions that it names."""


def run_message(
    batch_id: int, rows: Sequence[int], requests: Sequence[InferRequest], gathered: Gathered
) -> Run:
    """The message about a batch; ``rows`` are those of each request."""
    told = tuple(
        [
            _told(count, one)
            if one.parameters or one.outputs or one.sequence is not None or one.placements
            else count
            for count, one in zip(rows, requests, strict=True)
        ]
    )
    return Run(batch_id, told, gathered.tensors, gathered.fills)


def region_numbers(requests: Iterable[InferRequest]) -> set[int]:
    """The regions that a worker has to know for these requests."""
    return {one.number for request in requests for one in request.regions}


def place_of(one: RegionSlice) -> Place:
    """Where a slice lies, for a worker that knows its region."""
    return Place(one.number, one.offset, one.nbytes)


def _told(rows: int, request: InferRequest) -> WireRequest:
    """A request of which there is more to say than its rows."""
    placements = tuple([(name, place_of(one)) for name, one in request.placements.items()])
    return WireRequest(rows, request.parameters, request.outputs, placements, request.sequence, request.kept)
