"""Requests as a worker gets them, from arrays or lists by name: checked by the declaration, and merged to a
batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuserve.declare.spec import ModelSpec
from gpuserve_worker.calling.request import Batch
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, fits_shape, numpy_dtype
from gpuserve_worker.protocol.wire import WireRequest


class LocalRequest(NamedTuple):
    """The inputs of one request by name, with the batch axis in front where the model batches, and what a
    client says besides. ``sequence`` is (id, start, end).
    """

    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any] = {}
    requested_outputs: Sequence[str] = ()
    request_id: str = ""
    timeout_s: float = 0.0
    sequence: tuple[int | str, bool, bool] | None = None


def batch_of(spec: ModelSpec, requests: Sequence[LocalRequest]) -> tuple[Batch, list[WireRequest]]:
    """The batch that a worker would be given. Raises ``ValueError``: a server would refuse one of the
    requests, or would not merge them.
    """
    arrays = [_arrays(spec, one.inputs) for one in requests]
    rows = [_rows(spec, one) for one in arrays]
    if spec.max_batch_size and sum(rows) > spec.max_batch_size:
        raise ValueError(
            f"model {spec.name!r} takes {spec.max_batch_size} rows at once, and these have {sum(rows)}"
        )
    if len(requests) > 1 and not spec.max_batch_size:
        raise ValueError(f"model {spec.name!r} does not batch: expected one request at a time")
    if len({tuple((name, one.shape[1:]) for name, one in each.items()) for each in arrays}) > 1:
        raise ValueError(
            f"requests to model {spec.name!r} are merged only where they have the same inputs, of the same "
            "shapes behind the batch axis"
        )
    told = [_told(spec, one, count) for one, count in zip(requests, rows, strict=True)]
    merged = {
        name: arrays[0][name] if len(arrays) == 1 else np.concatenate([one[name] for one in arrays])
        for name in arrays[0]
    }
    names = tuple(one.name for one in spec.outputs)
    return Batch(merged, told, names, spec.max_batch_size > 0), told


def _told(spec: ModelSpec, request: LocalRequest, rows: int) -> WireRequest:
    unknown = set(request.requested_outputs).difference(one.name for one in spec.outputs)
    if unknown:
        raise ValueError(f"model {spec.name!r} has no output {min(unknown)!r}")
    details = (request.request_id, 0, request.timeout_s) if spec.request_details else None
    wanted = tuple(request.requested_outputs)
    return WireRequest(rows, dict(request.parameters), wanted, (), request.sequence, (), details)


def _arrays(spec: ModelSpec, inputs: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in inputs if all(name != one.name for one in spec.inputs)]
    missing = [one.name for one in spec.inputs if one.name not in inputs and not one.optional]
    if unknown or missing:
        what = f"has no input {unknown[0]!r}" if unknown else f"needs input {missing[0]!r}"
        known = ", ".join(one.name for one in spec.inputs) or "none"
        raise ValueError(f"model {spec.name!r} {what}; its inputs are {known}")
    return {one.name: _array(spec, one, inputs[one.name]) for one in spec.inputs if one.name in inputs}


def _array(spec: ModelSpec, tensor: TensorSpec, value: Any) -> Any:
    dtype = numpy_dtype(tensor.datatype)
    array = np.asarray(value) if isinstance(value, np.ndarray) else np.asarray(value, dtype=dtype)
    if tensor.datatype == BYTES:
        array = _strings(array)
    elif array.dtype != dtype:
        raise ValueError(
            f"input {tensor.name!r} of model {spec.name!r} is {tensor.datatype} ({dtype}), given "
            f"{array.dtype}"
        )
    inner = array.shape[1:] if spec.max_batch_size else array.shape
    if (spec.max_batch_size and array.ndim == 0) or not fits_shape(inner, tensor.shape):
        batch = "[rows] + " if spec.max_batch_size else ""
        raise ValueError(
            f"input {tensor.name!r} of model {spec.name!r} has shape {list(array.shape)}: expected {batch}"
            f"{list(tensor.shape)}"
        )
    return array


def _strings(array: Any) -> Any:
    elements = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel().tolist()]
    made = np.empty(len(elements), dtype=object)
    made[:] = elements
    return made.reshape(array.shape)


def _rows(spec: ModelSpec, arrays: Mapping[str, Any]) -> int:
    if not spec.max_batch_size:
        return 1
    counts = {len(one) for one in arrays.values()}
    if len(counts) != 1:
        raise ValueError(f"the inputs of a request to model {spec.name!r} differ in rows: {sorted(counts)}")
    return counts.pop()
