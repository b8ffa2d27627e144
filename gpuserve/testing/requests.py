"""Requests as a worker gets them, from arrays or lists by name: judged as the front judges a client's, and
merged to a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.v2.types import InferRequest, InputTensor
from gpuserve.front.v2.types import Sequence as RequestSequence
from gpuserve.front.v2.validation import CheckedRequest, ModelCheck
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.calling.questions import ModelCallError
from gpuserve_worker.calling.request import Batch
from gpuserve_worker.protocol.tensor import BYTES, datatype_of, encode_bytes, numpy_dtype
from gpuserve_worker.protocol.wire import WireRequest


class WrongCall(ValueError):
    """A test asks for what no client could, or not in one batch."""


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


def local_request(
    inputs: Mapping[str, Any],
    *,
    version: str | int = "",
    requested_outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    request_id: str = "",
    sequence_id: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
) -> LocalRequest:
    """A request of these inputs, with the options of ``ModelContext.infer``."""
    del version  # it has found the model already
    sequence = (sequence_id, sequence_start, sequence_end) if sequence_id else None
    return LocalRequest(inputs, parameters or {}, requested_outputs, request_id, timeout_s or 0.0, sequence)


def arrays_of(spec: ModelSpec, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs as arrays a client could send: lists as the model declares them, arrays as they are but for
    text, which is encoded. Raises WrongCall: one is no tensor.
    """
    declared = {one.name: one.datatype for one in spec.inputs}
    return {name: _array(name, value, declared.get(name)) for name, value in inputs.items()}


def batch_of(
    spec: ModelSpec, check: ModelCheck, requests: Sequence[LocalRequest]
) -> tuple[Batch, list[WireRequest]]:
    """The batch that a worker would be given. Raises ModelCallError: a server refuses one of the requests;
    WrongCall: it would not merge them.
    """
    arrays, checked = zip(*(checked_arrays(spec, check, one) for one in requests), strict=True)
    rows = [one.rows for one in checked]
    if len(requests) > 1 and not spec.max_batch_size:
        raise WrongCall(f"model {spec.name!r} does not batch: expected one request at a time")
    if spec.max_batch_size and sum(rows) > spec.max_batch_size:
        raise WrongCall(
            f"model {spec.name!r} takes {spec.max_batch_size} rows at once, and these have {sum(rows)}"
        )
    if len({one.merge_key for one in checked}) > 1:
        raise WrongCall(
            f"requests to model {spec.name!r} are merged only where they have the same inputs, of the same "
            "shapes behind the batch axis"
        )
    told = [_told(spec, one, count) for one, count in zip(requests, rows, strict=True)]
    present = [one.name for one in spec.inputs if one.name in arrays[0]]
    merged = {
        name: arrays[0][name] if len(arrays) == 1 else np.concatenate([one[name] for one in arrays])
        for name in present
    }
    if spec.array == "torch":
        from gpuserve_worker.calling.torch_tensors import as_tensor  # most models never need it

        merged = {name: as_tensor(one) for name, one in merged.items()}
    names = tuple(one.name for one in spec.outputs)
    return Batch(merged, told, names, spec.max_batch_size > 0), told


def _told(spec: ModelSpec, request: LocalRequest, rows: int) -> WireRequest:
    details = (request.request_id, 0, request.timeout_s) if spec.request_details else None
    wanted = tuple(request.requested_outputs)
    return WireRequest(rows, dict(request.parameters), wanted, (), request.sequence, (), details)


def checked_arrays(
    spec: ModelSpec, check: ModelCheck, request: LocalRequest
) -> tuple[dict[str, Any], CheckedRequest]:
    """The inputs of a request as arrays, and what the front makes of it. Raises ModelCallError: it refuses
    the request; WrongCall: an input is no tensor.
    """
    arrays = arrays_of(spec, request.inputs)
    tensors = [_tensor(name, array) for name, array in arrays.items()]
    outputs = tuple(request.requested_outputs)
    asked = InferRequest(
        spec.name, "", request.request_id, dict(request.parameters), tensors, outputs, request.timeout_s
    )
    asked.sequence = None if request.sequence is None else RequestSequence(*request.sequence)
    try:
        return arrays, check.check(asked)
    except InvalidArgument as error:
        raise ModelCallError(error.code.value, str(error)) from None


def _tensor(name: str, array: Any) -> InputTensor:
    datatype = datatype_of(array.dtype)
    if datatype == BYTES:
        data = encode_bytes(array.ravel().tolist())
    else:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()
    return InputTensor(name, datatype, array.shape, data)


def _array(name: str, value: Any, datatype: str | None) -> Any:
    try:
        array = value if isinstance(value, np.ndarray | np.generic) else _of_list(value, datatype)
        array = np.asarray(array)
        if array.dtype.kind in "US" or datatype_of(array.dtype) == BYTES:
            return _strings(array)
    except (ValueError, TypeError) as error:
        raise WrongCall(f"input {name!r}: {error}") from None
    return array


def _of_list(value: Any, datatype: str | None) -> Any:
    return np.asarray(value, dtype=None if datatype is None else numpy_dtype(datatype))


def _strings(array: Any) -> Any:
    elements = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel().tolist()]
    made = np.empty(len(elements), dtype=object)
    made[:] = elements
    return made.reshape(array.shape)
