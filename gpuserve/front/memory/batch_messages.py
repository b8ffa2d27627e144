"""The batches of one model as messages: what its workers are sent, and what they answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpuserve.front.batching import refusals
from gpuserve.front.batching.slots import Batch
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.device_inputs import NO_INPUTS, DeviceInputs
from gpuserve.front.memory.gather import Gathered, gather
from gpuserve.front.memory.scatter import Answer, WholeOutputs, scatter, uncut
from gpuserve.front.memory.sequence_rows import SequenceRows
from gpuserve.front.requests.inference import InferRequest
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)


class BatchMessages:
    """The messages of one model, whose inputs lie in ``arena`` where they are large."""

    def __init__(self, spec: ModelSpec, arena: Arena) -> None:
        self._spec = spec
        self._batched = spec.max_batch_size > 0
        self._arena = arena
        self._sequences = SequenceRows(spec) if spec.in_sequences else None
        self.device_inputs = DeviceInputs(spec)
        #: By which a request is to be known in what its callable logs; None where nobody wants to know.
        self.request_id: Callable[[InferRequest], str] | None = None

    def is_repeatable(self, request: InferRequest) -> bool:
        """Whether a request with blocks can be run again: no callable can have written to its body."""
        return self._spec.read_only_inputs or self.device_inputs.spare(request.inputs)

    def pack(self, batch: Batch, link: WorkerLink) -> tuple[Gathered, wire.Run]:
        """A batch's tensors, and the message that tells of them; OutOfMemory where the arena has no room."""
        members: Sequence[Any] = batch.requests if self._sequences is None else self._sequences.members(batch)
        requests: list[InferRequest] = []
        rows: list[int] = []
        nbytes = 0
        for one in members:
            requests.append(one.request)
            rows.append(one.rows)
            nbytes += one.nbytes
        to_device = self.device_inputs.by_instance.get(link.instance, NO_INPUTS)
        read_only = self._spec.read_only_inputs
        gathered = gather(requests, sum(rows), self._batched, nbytes, self._arena, link, read_only, to_device)
        run = run_message(batch.batch_id, rows, requests, gathered, may_wait=batch.may_wait)
        if self._spec.request_details:
            run = _detailed(run, requests)
        if self.request_id is not None:
            run = run._replace(request_ids=tuple(map(self.request_id, requests)))
        return gathered, run if self._sequences is None else self._sequences.told(run, batch, members)

    def uncut(self, link: WorkerLink, batch: Batch, message: wire.Done, readers: int) -> WholeOutputs | None:
        """The outputs of a batch for who cuts them apart; None where that is to be done by ``unpack``."""
        if self._sequences is not None:
            return None
        try:
            return uncut(self._spec, link, batch.requests, message, readers)
        except (ValueError, TypeError, KeyError):
            return None  # as ``unpack`` will say

    def unpack(
        self,
        link: WorkerLink,
        batch: Batch,
        message: wire.Done | wire.Yield,
        on_gone: Callable[[], None] | None = None,
    ) -> list[Answer]:
        try:
            if self._sequences is not None:
                return self._sequences.scatter(link, batch, message, on_gone)
            return scatter(self._spec, link, batch.requests, message, on_gone)
        except (ValueError, TypeError, KeyError) as error:
            # A worker is not trusted either: user code runs in it.
            logger.error("model %s: nonsense from instance %s: %s", self._spec.name, link.instance, error)
            wrong = refusals.nonsense(self._spec.name)
            return [wrong] * len(batch.requests)


def run_message(
    batch_id: int,
    rows: Sequence[int],
    requests: Sequence[InferRequest],
    gathered: Gathered,
    *,
    may_wait: bool = False,
) -> wire.Run:
    """The message about a batch; ``rows`` are those of each request, which is all that most have to say.
    Requests that share their parameters, which headers gave them, are told of by one object.
    """
    told: list[Any] = []
    shared: tuple[Any, ...] = (0, None)
    for count, one in zip(rows, requests, strict=True):
        if one.outputs or one.sequence is not None or one.placements or one.kept:
            told.append(_told(count, one))
        elif one.parameters:
            if shared[1] is not one.parameters or shared[0] != count:
                shared = _told(count, one)
            told.append(shared)
        else:
            told.append(count)
    return wire.Run(batch_id, tuple(told), gathered.tensors, gathered.fills, (), may_wait)


def _told(rows: int, one: InferRequest) -> tuple[Any, ...]:
    """A ``WireRequest``, as a plain tuple: msgpack takes 350 ns for one, and 900 for one with names."""
    places = one.placements.items()
    placements = tuple([(name, wire.Place(at.number, at.offset, at.nbytes)) for name, at in places])
    return tuple(wire.WireRequest(rows, one.parameters, one.outputs, placements, one.sequence, one.kept))


def _detailed(run: wire.Run, requests: Sequence[InferRequest]) -> wire.Run:
    """The message with what clients said of their requests, where they said anything."""
    told: list[Any] = []
    for one, request in zip(run.requests, requests, strict=True):
        details = request.id, request.priority, request.timeout_s or 0.0
        if any(details):
            fields: Any = (one, request.parameters, ()) if isinstance(one, int) else one
            told.append(tuple(wire.WireRequest(*fields)._replace(details=details)))
        else:
            told.append(one)
    return run._replace(requests=tuple(told))


def region_numbers(requests: Iterable[InferRequest]) -> set[int]:
    return {one.number for request in requests for one in request.regions}
