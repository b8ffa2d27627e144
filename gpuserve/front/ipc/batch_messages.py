"""Messages between the front and a model's workers about a batch, and its rows of sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpuserve.front.ipc.gather import NO_INPUTS, DeviceInputs, Gathered, copy_in_parts, gather
from gpuserve.front.ipc.scatter import Answer, WholeOutputs, scatter, scatter_step, whole_outputs
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.requests import inference
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import CORRID, END, START, ModelSpec, SequenceControl
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import BYTES, element_count, encode_bytes, numpy_dtype

logger = logging.getLogger(__name__)


class BatchMessages:
    """Encodes batches of one model, and decodes workers' answers. Large inputs lie in ``arena``."""

    def __init__(self, spec: ModelSpec, arena: Arena) -> None:
        self._spec = spec
        # A client could shrink its region between the reads of two ranks, which would then be out of step.
        self._in_place = spec.read_only_inputs and all(one.ranks == 1 for one in spec.instances)
        self._batched = spec.max_batch_size > 0
        self._arena = arena
        self._sequences = SequenceRows(spec) if spec.in_sequences else None
        self.device_inputs = DeviceInputs(spec)
        self._ragged = frozenset([one.name for one in spec.inputs if one.ragged]) or NO_INPUTS
        #: Returns the request id for the logs of the callable; None without an access log.
        self.request_id: Callable[[InferRequest], str] | None = None

    def is_repeatable(self, request: InferRequest) -> bool:
        """Return whether a request with blocks can run again: no callable can have written to its body."""
        return self._spec.read_only_inputs or self.device_inputs.cannot_be_written(request.inputs)

    def pack(
        self, batch: Batch, link: WorkerLink, traced_id: Callable[[InferRequest], str] | None = None
    ) -> tuple[Gathered, wire.Run]:
        """Return a batch's tensors and its ``Run`` message. Raises OutOfMemory if the arena has no room.

        ``traced_id`` returns the id of a request if requests may be traced.
        """
        members: Sequence[Any] = batch.requests if self._sequences is None else self._sequences.members(batch)
        requests: list[InferRequest] = []
        rows: list[int] = []
        nbytes = 0
        for one in members:
            requests.append(one.request)
            rows.append(one.rows)
            nbytes += one.nbytes
        to_device = self.device_inputs.by_instance.get(link.instance, NO_INPUTS)
        in_place = self._in_place
        gathered = gather(
            requests, sum(rows), self._batched, nbytes, self._arena, link, in_place, to_device, self._ragged
        )
        run = run_message(batch.batch_id, rows, requests, gathered, may_wait=batch.may_wait)
        if self._spec.request_details:
            for request in requests:
                if request.id or request.priority or request.timeout_s:
                    run = _with_details(run, requests)
                    break
        if self.request_id is not None:
            run = run._replace(request_ids=tuple(map(self.request_id, requests)))
        if traced_id is not None:
            run = _with_traces(run, members, traced_id)
        return gathered, run if self._sequences is None else self._sequences.add_controls(run, batch, members)

    def copies(self, gathered: Gathered) -> Iterator[None]:
        """Return the copies that a batch needs before its message is sent, one part per step."""
        return copy_in_parts(gathered.joins, self._arena)

    def whole_outputs(
        self, link: WorkerLink, batch: Batch, message: wire.Done, readers: int
    ) -> WholeOutputs | None:
        """Return the unsplit outputs of a batch for other readers; None if ``unpack`` must be used."""
        if self._sequences is not None:
            return None
        try:
            return whole_outputs(self._spec, link, batch.requests, message, readers)
        except (ValueError, TypeError, KeyError):
            return None  # ``unpack`` reports the error

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
            return self._reject(link, error, len(batch.requests))

    def unpack_step(
        self,
        link: WorkerLink,
        requests: Sequence[Any],
        message: wire.Stepped,
        on_gone: Sequence[Callable[[], None]],
    ) -> list[Answer]:
        """Return the answers in the message of a step, as ``scatter_step``."""
        try:
            return scatter_step(self._spec, link, requests, message, on_gone)
        except (ValueError, TypeError, KeyError) as error:
            return self._reject(link, error, len(requests))

    def _reject(self, link: WorkerLink, error: Exception, count: int) -> list[Answer]:
        """Log a malformed answer: workers are not trusted, because user code runs in them."""
        name = self._spec.name
        logger.error("model %s: rejected a malformed answer of instance %s: %s", name, link.instance, error)
        return [refusals.nonsense(name)] * count


def run_message(
    batch_id: int,
    rows: Sequence[int],
    requests: Sequence[InferRequest],
    gathered: Gathered,
    *,
    may_wait: bool = False,
) -> wire.Run:
    """Return the message about a batch. ``rows`` are the rows of each request, the only content of most
    requests.

    Requests that share one parameters object, which headers gave them, share one object in the message.
    """
    described: list[Any] = []
    shared: tuple[Any, ...] = (0, None)
    for count, one in zip(rows, requests, strict=True):
        if one.outputs or one.sequence is not None or one.placements or one.kept:
            described.append(_wire_request(count, one))
        elif one.parameters:
            if shared[1] is not one.parameters or shared[0] != count:
                shared = _wire_request(count, one)
            described.append(shared)
        else:
            described.append(count)
    return wire.Run(batch_id, tuple(described), gathered.tensors, gathered.fills, (), may_wait)


def _wire_request(rows: int, one: InferRequest) -> tuple[Any, ...]:
    """Return a ``WireRequest`` as a plain tuple: msgpack encodes that in 350 ns, a named tuple in 900 ns."""
    places = one.placements.items()
    placements = tuple([(name, wire.Place(at.number, at.offset, at.nbytes)) for name, at in places])
    return tuple(wire.WireRequest(rows, one.parameters, one.outputs, placements, one.sequence, one.kept))


def _with_details(run: wire.Run, requests: Sequence[InferRequest]) -> wire.Run:
    """Return the message with the ids, priorities and timeouts that clients set."""
    described: list[Any] = []
    for one, request in zip(run.requests, requests, strict=True):
        details = request.id, request.priority, request.timeout_s or 0.0
        if any(details):
            fields: Any = (one, request.parameters, ()) if isinstance(one, int) else one
            described.append(tuple(wire.WireRequest(*fields)._replace(details=details)))
        else:
            described.append(one)
    return run._replace(requests=tuple(described))


def _with_traces(run: wire.Run, members: Sequence[Any], traced_id: Callable[[InferRequest], str]) -> wire.Run:
    """Return the message with the trace contexts of its requests, if any request is traced."""
    found = [getattr(one, "trace", None) for one in members]
    traces = tuple([() if one is None else one.context for one in found])
    if not any(traces):
        return run
    ids = run.request_ids or tuple([traced_id(one.request) for one in members])
    return run._replace(request_ids=ids, traces=traces)


def region_numbers(requests: Iterable[InferRequest]) -> set[int]:
    return {one.number for request in requests for one in request.regions}


class EmptyRow:
    """A placeholder in a batch for a sequence that keeps its row and has no request in the batch."""

    rows: Final = 1

    def __init__(self, like: InferRequest) -> None:
        inputs = [InputTensor(one.name, one.datatype, one.shape, _empty_data(one)) for one in like.inputs]
        self.request = InferRequest(like.model_name, like.model_version, "", {}, inputs, (), None)
        self.nbytes = sum(len(one.data) for one in inputs)


class SequenceRows:
    """The rows of one model's batches of sequences: control inputs, and empty rows."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def members(self, batch: Batch) -> Sequence[Any]:
        if not batch.seats:
            return batch.requests
        pending: Mapping[int, Any] = dict(zip(batch.seats, batch.requests, strict=True))
        empty = EmptyRow(pending[batch.seats[0]].request)
        return [pending.get(row, empty) for row in range(max(batch.seats) + 1)]

    def add_controls(self, run: wire.Run, batch: Batch, members: Sequence[Any]) -> wire.Run:
        """Return the message of a batch with the control inputs and the dropped sequences."""
        rows = [None if isinstance(one, EmptyRow) else one.request.sequence for one in members]
        controls = [self._control(control, rows) for control in self._spec.sequence.controls]
        return run._replace(inputs=(*run.inputs, *controls), dropped=batch.dropped)

    def scatter(
        self,
        link: WorkerLink,
        batch: Batch,
        message: wire.Done | wire.Yield,
        on_gone: Callable[[], None] | None,
    ) -> list[Answer]:
        """Return the answers of the batch's requests, as ``scatter``. Outputs of empty rows are dropped."""
        members = self.members(batch)
        answers = scatter(self._spec, link, members, message, on_gone)
        for member, answer in zip(members, answers, strict=True):
            if isinstance(member, EmptyRow) and isinstance(answer, InferResponse):
                answer.close()
        pairs = zip(members, answers, strict=True)
        return [answer for member, answer in pairs if not isinstance(member, EmptyRow)]

    def _control(
        self, control: SequenceControl, rows: Sequence[inference.Sequence | None]
    ) -> wire.WireTensor:
        shape = (len(rows), 1) if self._spec.max_batch_size else (1,)
        if control.kind != CORRID:
            values = [control.false_true[_is_set(control.kind, row)] for row in rows]
            data = np.array(values, numpy_dtype(control.dtype)).tobytes()
        elif control.dtype == BYTES:
            texts = ["" if row is None else str(row.id) for row in rows]
            data = encode_bytes([text.encode("utf-8", "replace") for text in texts])
        else:
            ids = [0 if row is None else row.id for row in rows]
            data = np.array(ids, numpy_dtype(control.dtype)).tobytes()
        return wire.WireTensor(control.name, control.dtype, shape, data)


def _is_set(kind: str, row: inference.Sequence | None) -> bool:
    if row is None:
        return False
    if kind == START:
        return row.start
    return row.end if kind == END else True  # the control READY


def _empty_data(tensor: InputTensor) -> bytes:
    """Return as many elements as the tensor has: zeros, or empty strings."""
    if tensor.datatype == BYTES:
        return bytes(4 * element_count(tensor.shape))
    return bytes(len(tensor.data))
