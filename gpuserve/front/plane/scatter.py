"""Cuts what a worker answered for a batch into one response for each of its requests.

The counterpart of ``gather``. Outputs that lie in the worker's arena are not copied here: a
response holds views, and the worker is told that a block is free when the last response over it has
been written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from gpuserve.errors import Internal, RequestError, request_error
from gpuserve.front.endpoint.v2 import InferRequest, InferResponse, OutputTensor
from gpuserve.front.links import WorkerLink
from gpuserve.spec import ModelSpec
from gpuserve_worker import wire
from gpuserve_worker.tensor import BYTES, ITEMSIZE, element_count

Answer: TypeAlias = InferResponse | RequestError


class _Lease:
    """The blocks of one answer in the worker's arena, given back when every response is closed."""

    __slots__ = ("_blocks", "_left", "_link")

    def __init__(self, link: WorkerLink, blocks: tuple[tuple[int, int], ...], holders: int) -> None:
        self._link = link
        self._blocks = blocks
        self._left = holders

    def release(self) -> None:
        self._left -= 1
        if not self._left:
            self._link.send(wire.Free(self._blocks))


def scatter(spec: ModelSpec, link: WorkerLink, batch: Sequence[Any], done: wire.Done) -> list[Answer]:
    """One answer for each request of the batch (``PendingRequest`` objects), in order.

    Raises:
        ValueError, TypeError, KeyError: the worker's message does not fit the batch. All that it
            says of sizes and places is checked before it is used.
    """
    if done.outputs is not None:
        tensors = wire.tensors(done.outputs)
        per_request = _cut(tensors, [one.rows for one in batch], link)
        blocks = _blocks(tensors)
    else:
        responses = [one for one in wire.responses(done.responses or ()) if one is not None]
        if len(responses) != len(batch):
            raise ValueError(f"{len(responses)} responses to {len(batch)} requests")
        per_request = [
            one if isinstance(one, wire.WireFailure) else [_whole(t, link) for t in one] for one in responses
        ]
        blocks = _blocks([t for one in responses if not isinstance(one, wire.WireFailure) for t in one])
    on_close = _Lease(link, blocks, len(batch)).release if blocks else None
    version = str(spec.version)
    return [
        _answer(spec, version, pending.request, outputs, on_close)
        for pending, outputs in zip(batch, per_request, strict=True)
    ]


def _answer(
    spec: ModelSpec,
    version: str,
    request: InferRequest,
    outputs: list[OutputTensor] | wire.WireFailure,
    on_close: Any,
) -> Answer:
    if isinstance(outputs, wire.WireFailure):
        if on_close is not None:
            on_close()
        return request_error(*outputs)
    if request.outputs:
        by_name = {one.name: one for one in outputs}
        missing = [name for name in request.outputs if name not in by_name]
        if missing:
            if on_close is not None:
                on_close()
            return Internal(f"model {spec.name!r} did not return the requested output {missing[0]!r}")
        outputs = [by_name[name] for name in request.outputs]
    return InferResponse(spec.name, version, request.id, {}, outputs, on_close)


def _blocks(tensors: Sequence[wire.WireTensor]) -> tuple[tuple[int, int], ...]:
    return tuple({one.payload[:2] for one in tensors if isinstance(one.payload, wire.Ref)})


def _data(tensor: wire.WireTensor, link: WorkerLink) -> bytes | memoryview:
    """The bytes of a tensor, which must be as many as its shape and datatype say."""
    payload = tensor.payload
    data = payload if isinstance(payload, bytes) else link.outputs.view(*payload)
    itemsize = ITEMSIZE[tensor.datatype]
    if itemsize and len(data) != itemsize * element_count(tensor.shape):
        raise ValueError(
            f"output {tensor.name!r} of shape {tensor.shape} has {len(data)} bytes of {tensor.datatype}"
        )
    return data


def _whole(tensor: wire.WireTensor, link: WorkerLink) -> OutputTensor:
    return OutputTensor(tensor.name, tensor.datatype, tensor.shape, _data(tensor, link))


def _cut(tensors: Sequence[wire.WireTensor], rows: list[int], link: WorkerLink) -> list[Any]:
    """Tensors of the whole batch as a list of tensors for each request."""
    if len(rows) == 1:
        return [[_whole(tensor, link) for tensor in tensors]]
    cut: list[list[OutputTensor]] = [[] for _ in rows]
    for tensor in tensors:
        if not tensor.shape or tensor.shape[0] != sum(rows):
            raise ValueError(f"output {tensor.name!r} of shape {tensor.shape} for {sum(rows)} rows")
        data, inner = _data(tensor, link), tensor.shape[1:]
        ends = _row_ends(tensor, data, rows)
        start = 0
        for into, count, end in zip(cut, rows, ends, strict=True):
            into.append(OutputTensor(tensor.name, tensor.datatype, (count, *inner), data[start:end]))
            start = end
    return cut


def _row_ends(tensor: wire.WireTensor, data: bytes | memoryview, rows: list[int]) -> list[int]:
    """Where in ``data`` the rows of each request end."""
    ends: list[int] = []
    end = 0
    if tensor.datatype != BYTES:
        row_nbytes = ITEMSIZE[tensor.datatype] * element_count(tensor.shape[1:])
        for count in rows:
            end += count * row_nbytes
            ends.append(end)
        return ends
    elements_a_row = element_count(tensor.shape[1:])
    for count in rows:
        for _ in range(count * elements_a_row):
            end += 4 + int.from_bytes(data[end : end + 4], "little")
        ends.append(end)
    if end != len(data):
        raise ValueError(f"output {tensor.name!r} has {len(data)} bytes, its elements take {end}")
    return ends
