"""The outputs of a batch, one response per request: views of the worker's arena, freed by the last one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.core.errors import Internal, RequestError, request_error
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.ipc.worker_memory import KeptTensor, OutputMemory
from gpuserve.front.requests.inference import NOTHING, InferRequest, InferResponse, OutputTensor
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import ORPHANS, OUTPUT_LEASE
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, element_count, element_ends

#: The answer to one request; None: no response in this message.
Answer: TypeAlias = InferResponse | RequestError | None
#: No parameters, for any number of requests.
_NO_PARAMETERS: Final = itertools.repeat(NOTHING)
_Outputs: TypeAlias = list[OutputTensor] | wire.WireFailure | None


class _MessageLease:
    """Duties to the worker once all responses of a message are closed: free blocks, grant credit."""

    __slots__ = ("_blocks", "_exported", "_left", "_link", "_on_gone")

    memory_kind = OUTPUT_LEASE

    def __init__(
        self,
        link: WorkerLink,
        blocks: tuple[tuple[int, int], ...],
        exported: tuple[tuple[int, int], ...],
        holders: int,
        on_gone: Callable[[], None] | None,
    ) -> None:
        self._link = link
        self._blocks = blocks
        self._exported = exported
        self._left = holders
        self._on_gone = on_gone
        link.exports.owed += bool(exported)

    def __del__(self) -> None:
        if self._left > 0:
            ORPHANS.add(self)

    def release(self) -> None:
        self._left -= 1
        if not self._left:
            self._end()

    def reclaim(self) -> None:
        """Release everything, even if responses are still open."""
        if self._left > 0:
            self._left = 0
            self._end()

    def _end(self) -> None:
        if self._blocks:
            self._link.post_soon(wire.Free(self._blocks))
        if self._exported:
            self._link.send(wire.FreeExports(self._exported))
            self._link.exports.owed -= 1
        if self._on_gone is not None:
            self._on_gone()


class WholeOutputs(NamedTuple):
    """A batch's checked, unsplit outputs: bytes, or places in ``memory``. Readers call ``release`` once."""

    version: str
    tensors: tuple[wire.WireTensor, ...]
    memory: OutputMemory
    release: Callable[[], None] | None


def whole_outputs(
    spec: ModelSpec, link: WorkerLink, batch: Sequence[Any], message: wire.Done, readers: int
) -> WholeOutputs | None:
    """Return the unsplit outputs of a batch for ``readers`` readers, each of which splits them; None if every
    request has outputs of its own, or an output is ragged. Raises as ``scatter``.
    """
    if message.outputs is None or message.parameters:
        return None
    tensors = wire.tensors(message.outputs)
    if any(map(is_ragged, tensors)):
        return None
    for one in tensors:
        _data(one, link)
        if len(batch) > 1:
            _check_rows(one.name, one.shape, sum([request.rows for request in batch]))
    blocks = _blocks(tensors)
    release = _MessageLease(link, blocks, (), readers, None).release if blocks else None
    return WholeOutputs(str(spec.version), tensors, link.outputs, release)


def scatter(
    spec: ModelSpec,
    link: WorkerLink,
    batch: Sequence[Any],
    message: wire.Done | wire.Yield,
    on_gone: Callable[[], None] | None = None,
) -> list[Answer]:
    """Return one answer for each request of the batch, in order. ``on_gone`` is called when all are closed.

    Raises ValueError, TypeError or KeyError if the message does not fit; its sizes and places are checked
    before use.
    """
    per_request: Sequence[_Outputs]
    exported: tuple[tuple[int, int], ...] = ()
    if message.outputs is not None:
        tensors = wire.tensors(message.outputs)
        per_request = _split(tensors, batch, link)
        blocks = _blocks(tensors)
    else:
        per_request, blocks, exported = _responses(wire.responses(message.responses or ()), link)
        if len(per_request) != len(batch):
            raise ValueError(f"{len(per_request)} responses to {len(batch)} requests")
        if exported:
            _check_kept(batch, per_request)
        if on_gone is None and None in per_request:
            raise ValueError("a request without a response")
    lease = on_close = None
    if blocks or exported or on_gone is not None:
        lease = _MessageLease(link, blocks, exported, len(batch), on_gone)
        on_close = lease.release
    parameters: Iterable[Mapping[str, Any]] = _NO_PARAMETERS
    if message.parameters:
        parameters = _parameters(message.parameters, len(batch))
    name, version, memory = spec.name, str(spec.version), link.outputs
    answers: list[Answer] = []
    try:
        for pending, outputs, given in zip(batch, per_request, parameters, strict=False):
            request = pending.request
            if not isinstance(outputs, list) or request.outputs or request.placements:
                chosen = _select_or_close(spec, request, outputs, on_close)
                if not isinstance(chosen, list):
                    answers.append(chosen)
                    continue
                outputs = chosen
            answers.append(InferResponse(name, version, request.id, given, outputs, on_close, memory))
    except ValueError:
        if lease is not None:
            lease.reclaim()
        raise
    return answers


def scatter_step(
    spec: ModelSpec,
    link: WorkerLink,
    batch: Sequence[Any],
    message: wire.Stepped,
    on_gone: Sequence[Callable[[], None]],
) -> list[Answer]:
    """Return one answer for each request in a step's message. ``on_gone`` are called when the responses are
    closed, one by one: no client waits for another. Raises as ``scatter``.
    """
    per_request: Sequence[Any]
    if message.outputs is not None:
        per_request = _unstacked(wire.tensors(message.outputs), len(batch), link)
    else:
        per_request, blocks, exported = _responses(wire.responses(message.responses or ()), link)
        if blocks or exported or not all(isinstance(one, list) for one in per_request):
            raise ValueError("a response of a step that is not in its message")
    if len(per_request) != len(batch):
        raise ValueError(f"{len(per_request)} responses to {len(batch)} requests")
    parameters: Iterable[Mapping[str, Any]] = _NO_PARAMETERS
    if message.parameters:
        parameters = _parameters(message.parameters, len(batch))
    name, version, memory = spec.name, str(spec.version), link.outputs
    answers: list[Answer] = []
    for pending, outputs, given, gone in zip(batch, per_request, parameters, on_gone, strict=False):
        chosen = _select_or_close(spec, pending.request, outputs, gone)
        if isinstance(chosen, list):
            answers.append(InferResponse(name, version, pending.request.id, given, chosen, gone, memory))
        else:
            answers.append(chosen)
    return answers


def _unstacked(tensors: Sequence[wire.WireTensor], count: int, link: WorkerLink) -> list[_Outputs]:
    """Return stacked tensors as a list of tensors for each request."""
    columns: list[list[OutputTensor]] = []
    for one in tensors:
        if not isinstance(one.payload, bytes) or one.datatype == BYTES:
            raise ValueError(f"output {one.name!r} of a step is not stacked in its message")
        _check_rows(one.name, one.shape, count)
        data, inner = _data(one, link), one.shape[1:]
        size = len(data) // count
        column = [data[at * size : at * size + size] for at in range(count)]
        columns.append([OutputTensor(one.name, one.datatype, inner, part) for part in column])
    return [list(one) for one in zip(*columns, strict=True)] if columns else [[] for _ in range(count)]


def _parameters(given: tuple[dict[str, Any], ...], count: int) -> tuple[dict[str, Any], ...]:
    if len(given) != count:
        raise ValueError(f"parameters of {len(given)} responses to {count} requests")
    for one in given:
        for key, value in one.items():
            if not isinstance(key, str) or not isinstance(value, bool | int | float | str):
                raise ValueError(f"a response parameter that is a {type(value).__name__}")
    return given


def _responses(
    responses: Sequence[tuple[wire.WireTensor, ...] | wire.WireFailure | None], link: WorkerLink
) -> tuple[list[_Outputs], tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return the outputs of each request, and the blocks of all of them, in the arena and on the device."""
    per_request: list[_Outputs] = []
    tensors: list[wire.WireTensor] = []
    for one in responses:
        if one is None or isinstance(one, wire.WireFailure):
            per_request.append(one)
        else:
            per_request.append([_output(tensor, link) for tensor in one])
            tensors += one
    exported = tuple([one.payload[:2] for one in tensors if isinstance(one.payload, wire.Exported)])
    return per_request, _blocks(tensors), exported


def _select_or_close(
    spec: ModelSpec, request: InferRequest, outputs: _Outputs, on_close: Callable[[], None] | None
) -> list[OutputTensor] | RequestError | None:
    """Return the requested outputs, or the error or None in their place, after closing the lease."""
    found: list[OutputTensor] | RequestError | None
    if isinstance(outputs, list):
        found = select_outputs(spec, request, outputs)
        if isinstance(found, list):
            return found
    else:
        found = None if outputs is None else request_error(*outputs)
    if on_close is not None:
        on_close()
    return found


def select_outputs(
    spec: ModelSpec, request: InferRequest, outputs: list[OutputTensor]
) -> list[OutputTensor] | RequestError:
    """Return the outputs that a request asks for, in that order; an error if one is missing."""
    if request.outputs and request.outputs != tuple([one.name for one in outputs]):
        by_name = {one.name: one for one in outputs}
        missing = [name for name in request.outputs if name not in by_name]
        if missing:
            return Internal(f"model {spec.name!r} did not return the requested output {missing[0]!r}")
        outputs = [by_name[name] for name in request.outputs]
    if request.placements:
        for output in outputs:
            if output.placed is not (output.name in request.placements):
                raise ValueError(f"output {output.name!r} is not where it was asked to be")
    return outputs


def _check_kept(batch: Sequence[Any], per_request: Sequence[_Outputs]) -> None:
    for pending, outputs in zip(batch, per_request, strict=True):
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, KeptTensor) and output.name not in pending.request.kept:
                raise ValueError(f"output {output.name!r} was kept, which nobody asked for")


def is_ragged(tensor: wire.WireTensor | OutputTensor) -> bool:
    """Return whether the shape of a tensor of a batch is a sequence with the shape of each request."""
    return bool(tensor.shape) and not isinstance(tensor.shape[0], int)


def _blocks(tensors: Sequence[wire.WireTensor]) -> tuple[tuple[int, int], ...]:
    """Return the blocks that outputs lie in, each once: (segment, offset) in the worker's arena."""
    places = set()
    for one in tensors:
        if isinstance(one.payload, wire.Ref):
            places.add(one.payload[:2])
    return tuple(places)


def _data(tensor: wire.WireTensor, link: WorkerLink) -> bytes | memoryview:
    """Return the bytes of a tensor. Raises ValueError unless their number fits its shape and datatype."""
    payload = tensor.payload
    data: bytes | memoryview
    if isinstance(payload, bytes):
        data = payload
    elif isinstance(payload, wire.Ref):
        data = link.outputs.view(*payload)
    else:
        raise ValueError(f"output {tensor.name!r} is in memory that is not the worker's")
    if is_ragged(tensor):  # checked when it is split
        return data
    itemsize = ITEMSIZE[tensor.datatype]
    if itemsize and len(data) != itemsize * element_count(tensor.shape):
        raise ValueError(
            f"output {tensor.name!r} of shape {tensor.shape} has {len(data)} bytes of {tensor.datatype}"
        )
    return data


def _output(tensor: wire.WireTensor, link: WorkerLink) -> OutputTensor:
    name, datatype, shape, payload = tensor
    if isinstance(payload, wire.Place):
        return OutputTensor(name, datatype, shape, b"", True)
    if isinstance(payload, wire.Exported):
        return link.exports.kept_tensor(name, datatype, shape, payload)
    if is_ragged(tensor):
        raise ValueError(f"output {name!r} of one request has the shapes {shape}")
    return OutputTensor(name, datatype, shape, _data(tensor, link))


def _split(tensors: Sequence[wire.WireTensor], batch: Sequence[Any], link: WorkerLink) -> list[_Outputs]:
    """Return tensors of the whole batch, none of them in a region, as a list of tensors for each request."""
    if len(batch) == 1:
        whole = []
        for one in tensors:
            if is_ragged(one):
                break
            whole.append(OutputTensor(one.name, one.datatype, one.shape, _data(one, link)))
        else:
            return [whole]
    rows = [one.rows for one in batch]
    return split_outputs(
        [OutputTensor(one.name, one.datatype, one.shape, _data(one, link)) for one in tensors], rows
    )


def split_outputs(tensors: Sequence[OutputTensor], rows: Sequence[int]) -> list[Any]:
    """Return tensors of a whole batch, of shape [sum(rows), …], as a list of [rows, …] for each request."""
    by_tensor = [_split_tensor(one, rows) for one in tensors]
    if len(by_tensor) == 1:
        return [[one] for one in by_tensor[0]]
    return [list(one) for one in zip(*by_tensor, strict=True)] if by_tensor else [[] for _ in rows]


def _check_rows(name: str, shape: tuple[int, ...], rows: int) -> None:
    if not shape or shape[0] != rows:
        raise ValueError(f"output {name!r} of shape {shape} for {rows} rows")


def _split_tensor(tensor: OutputTensor, rows: Sequence[int]) -> list[OutputTensor]:
    name, datatype, shape, data = tensor.name, tensor.datatype, tensor.shape, tensor.data
    if is_ragged(tensor):
        return _split_ragged(tensor, rows)
    _check_rows(name, shape, sum(rows))
    inner = shape[1:]
    shapes = {count: (count, *inner) for count in set(rows)}
    if datatype == BYTES:
        elements_a_row = element_count(inner)
        ends = element_ends(data, [count * elements_a_row for count in rows])
        return [
            OutputTensor(name, datatype, shapes[count], data[start:end])
            for count, start, end in zip(rows, (0, *ends), ends, strict=False)
        ]
    row_nbytes = ITEMSIZE[datatype] * element_count(inner)
    column: list[OutputTensor] = []
    start = 0
    for count in rows:
        end = start + count * row_nbytes
        column.append(OutputTensor(name, datatype, shapes[count], data[start:end]))
        start = end
    return column


def _split_ragged(tensor: OutputTensor, rows: Sequence[int]) -> list[OutputTensor]:
    name, datatype, data = tensor.name, tensor.datatype, tensor.data
    of_requests: Iterable[Any] = tensor.shape
    shapes = list(map(tuple, of_requests))
    if [one[0] for one in shapes] != list(rows) or min(map(min, shapes)) < 0:
        raise ValueError(f"output {name!r} of shapes {shapes} for requests of {rows} rows")
    counts = map(math.prod, shapes)
    if datatype == BYTES:
        ends = element_ends(data, list(counts))
    else:
        itemsize = ITEMSIZE[datatype]
        ends = [itemsize * end for end in itertools.accumulate(counts)]
        if ends[-1] != len(data):
            raise ValueError(f"output {name!r} of shapes {shapes} has {len(data)} bytes of {datatype}")
    column: list[OutputTensor] = []
    start = 0
    for shape, end in zip(shapes, ends, strict=True):
        column.append(OutputTensor(name, datatype, shape, data[start:end]))
        start = end
    return column
