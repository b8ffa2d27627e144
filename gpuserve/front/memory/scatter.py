"""Cuts what a worker answered for a batch into responses, which hold views of the worker's arena: when the
last one over a block is written, the worker is told that it is free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.core.errors import Internal, RequestError, request_error
from gpuserve.front.links.export_memory import KeptTensor
from gpuserve.front.links.output_memory import OutputMemory
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.requests.inference import NOTHING, InferRequest, InferResponse, OutputTensor
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.orphans import ORPHANS, OUTPUT_LEASE
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, element_count, element_ends

#: What came for one request; None: nothing this time.
Answer: TypeAlias = InferResponse | RequestError | None
#: As many as there may be requests.
_NO_PARAMETERS: Final = itertools.repeat(NOTHING)
_Outputs: TypeAlias = list[OutputTensor] | wire.WireFailure | None


class _MessageLease:
    """What is owed to the worker when every response of one message is closed: blocks, a stream's word."""

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
        """Give everything back, whoever has not closed a response."""
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
    """The outputs of a batch, checked and not cut, with bytes or places in ``memory``. ``release`` is called
    by each who reads them, once, where that is not None.
    """

    version: str
    tensors: tuple[wire.WireTensor, ...]
    memory: OutputMemory
    release: Callable[[], None] | None


def uncut(
    spec: ModelSpec, link: WorkerLink, batch: Sequence[Any], message: wire.Done, readers: int
) -> WholeOutputs | None:
    """The outputs of a batch for so many readers, each of whom cuts them apart; None where every request has
    its own. Raises as ``scatter``.
    """
    if message.outputs is None or message.parameters:
        return None
    tensors = wire.tensors(message.outputs)
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
    """One answer for each request of the batch, in order; ``on_gone`` is called when all are closed.
    ValueError, TypeError, KeyError: the message does not fit; its sizes and places are checked before use.
    """
    per_request: Sequence[_Outputs]
    exported: tuple[tuple[int, int], ...] = ()
    if message.outputs is not None:
        tensors = wire.tensors(message.outputs)
        per_request = _cut(tensors, batch, link)
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
                chosen = _chosen(spec, request, outputs, on_close)
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
    """The outputs of each request, and the blocks of all of them, in the arena and on the device."""
    per_request: list[_Outputs] = []
    tensors: list[wire.WireTensor] = []
    for one in responses:
        if one is None or isinstance(one, wire.WireFailure):
            per_request.append(one)
        else:
            per_request.append([_whole(tensor, link) for tensor in one])
            tensors += one
    exported = tuple([one.payload[:2] for one in tensors if isinstance(one.payload, wire.Exported)])
    return per_request, _blocks(tensors), exported


def _chosen(
    spec: ModelSpec,
    request: InferRequest,
    outputs: _Outputs,
    on_close: Callable[[], None] | None,
) -> list[OutputTensor] | RequestError | None:
    """The outputs that the request asks for; or what it is told in their place, and then holds nothing."""
    found: list[OutputTensor] | RequestError | None
    if isinstance(outputs, list):
        found = requested(spec, request, outputs)
        if isinstance(found, list):
            return found
    else:
        found = None if outputs is None else request_error(*outputs)
    if on_close is not None:
        on_close()
    return found


def requested(
    spec: ModelSpec, request: InferRequest, outputs: list[OutputTensor]
) -> list[OutputTensor] | RequestError:
    """Those of a request's outputs that it asks for, in that order; an error where one is missing."""
    if request.outputs:
        by_name = {one.name: one for one in outputs}
        missing = [name for name in request.outputs if name not in by_name]
        if missing:
            return Internal(f"model {spec.name!r} did not return the requested output {missing[0]!r}")
        outputs = [by_name[name] for name in request.outputs]
    if request.placements:
        _check_placed(request, outputs)
    return outputs


def _check_placed(request: InferRequest, outputs: Sequence[OutputTensor]) -> None:
    """An output lies in the client's region if, and only if, that was asked for."""
    for output in outputs:
        if output.placed is not (output.name in request.placements):
            raise ValueError(f"output {output.name!r} is not where it was asked to be")


def _check_kept(batch: Sequence[Any], per_request: Sequence[_Outputs]) -> None:
    for pending, outputs in zip(batch, per_request, strict=True):
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, KeptTensor) and output.name not in pending.request.kept:
                raise ValueError(f"output {output.name!r} was kept, which nobody asked for")


def _blocks(tensors: Sequence[wire.WireTensor]) -> tuple[tuple[int, int], ...]:
    """The blocks that outputs lie in, each once: (segment, offset) in the worker's arena."""
    places = set()
    for one in tensors:
        if isinstance(one.payload, wire.Ref):
            places.add(one.payload[:2])
    return tuple(places)


def _data(tensor: wire.WireTensor, link: WorkerLink) -> bytes | memoryview:
    """The bytes of a tensor, which must be as many as its shape and datatype say."""
    payload = tensor.payload
    data: bytes | memoryview
    if isinstance(payload, bytes):
        data = payload
    elif isinstance(payload, wire.Ref):
        data = link.outputs.view(*payload)
    else:
        raise ValueError(f"output {tensor.name!r} is in memory that is not the worker's")
    itemsize = ITEMSIZE[tensor.datatype]
    if itemsize and len(data) != itemsize * element_count(tensor.shape):
        raise ValueError(
            f"output {tensor.name!r} of shape {tensor.shape} has {len(data)} bytes of {tensor.datatype}"
        )
    return data


def _whole(tensor: wire.WireTensor, link: WorkerLink) -> OutputTensor:
    name, datatype, shape, payload = tensor
    if isinstance(payload, wire.Place):
        return OutputTensor(name, datatype, shape, b"", True)
    if isinstance(payload, wire.Exported):
        return link.exports.kept(name, datatype, shape, payload)
    return OutputTensor(name, datatype, shape, _data(tensor, link))


def _cut(tensors: Sequence[wire.WireTensor], batch: Sequence[Any], link: WorkerLink) -> list[_Outputs]:
    """Tensors of the whole batch, none of them in a region, as a list of tensors for each request."""
    if len(batch) == 1:
        whole = []
        for one in tensors:
            whole.append(OutputTensor(one.name, one.datatype, one.shape, _data(one, link)))  # noqa: PERF401
        return [whole]
    rows = [one.rows for one in batch]
    return cut([OutputTensor(one.name, one.datatype, one.shape, _data(one, link)) for one in tensors], rows)


def cut(tensors: Sequence[OutputTensor], rows: Sequence[int]) -> list[Any]:
    """Tensors of a whole batch, of shape [sum(rows), …], as a list of [rows, …] for each request."""
    columns = [_column(one, rows) for one in tensors]
    if len(columns) == 1:
        return [[one] for one in columns[0]]
    return [list(one) for one in zip(*columns, strict=True)] if columns else [[] for _ in rows]


def _check_rows(name: str, shape: tuple[int, ...], rows: int) -> None:
    if not shape or shape[0] != rows:
        raise ValueError(f"output {name!r} of shape {shape} for {rows} rows")


def _column(tensor: OutputTensor, rows: Sequence[int]) -> list[OutputTensor]:
    name, datatype, shape, data = tensor.name, tensor.datatype, tensor.shape, tensor.data
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
