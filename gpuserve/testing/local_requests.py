"""Arrays or lists become a worker's batch, checked as the front does; results become arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuserve.api.notebook_html import arrays_html
from gpuserve.core.errors import InvalidArgument
from gpuserve.front.requests.inference import InferRequest, InputTensor
from gpuserve.front.requests.inference import Sequence as RequestSequence
from gpuserve.front.requests.validation import CheckedRequest, ModelCheck
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.model_calls import ModelCallError
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.inference.ragged import RaggedTensor, ragged_names
from gpuserve_worker.protocol.tensor import BYTES, datatype_of, decode_bytes, encode_bytes, numpy_dtype
from gpuserve_worker.protocol.wire import WireFailure, WireRequest


class WrongCall(ValueError):
    """A call that no client could make, or not in one batch."""


class LocalRequest(NamedTuple):
    """The inputs of one request by name, and the client's options. Inputs have the batch axis in front if the
    model batches. ``sequence`` is (id, start, end).
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
    """Return a request with these inputs and the options of ``ModelContext.infer``."""
    del version  # the caller has selected the version
    sequence = (sequence_id, sequence_start, sequence_end) if sequence_id else None
    return LocalRequest(inputs, parameters or {}, requested_outputs, request_id, timeout_s or 0.0, sequence)


def input_arrays(spec: ModelSpec, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs as arrays that a client could send, lists as declared; raise WrongCall."""
    declared = {one.name: one.datatype for one in spec.inputs}
    return {name: _input_array(name, value, declared.get(name)) for name, value in inputs.items()}


def worker_batch(
    spec: ModelSpec, check: ModelCheck, requests: Sequence[LocalRequest]
) -> tuple[Batch, list[WireRequest]]:
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
    described = []
    for one, count in zip(requests, rows, strict=True):
        details = (one.request_id, 0, one.timeout_s) if spec.request_details else None
        wanted = tuple(one.requested_outputs)
        described.append(WireRequest(count, dict(one.parameters), wanted, (), one.sequence, (), details))
    present = [one.name for one in spec.inputs if one.name in arrays[0]]
    ragged = ragged_names(spec.inputs, spec.outputs)
    columns = {name: [one[name] for one in arrays] for name in present}
    shapes = {name: [one.shape for one in columns[name]] for name in present if name in ragged.inputs}
    for name in shapes:
        columns[name] = [one.reshape(-1) for one in columns[name]]
    merged: dict[str, Any] = {
        name: column[0] if len(column) == 1 else np.concatenate(column) for name, column in columns.items()
    }
    if spec.array == "torch":
        from gpuserve_worker.protocol.tensor import as_tensor  # most models do not need torch

        merged = {name: as_tensor(one) for name, one in merged.items()}
    for name, of_requests in shapes.items():
        merged[name] = RaggedTensor(merged[name], of_requests, ragged.inputs[name])
    names = tuple(one.name for one in spec.outputs)
    return Batch(merged, described, names, spec.max_batch_size > 0, ragged), described


def checked_arrays(
    spec: ModelSpec, check: ModelCheck, request: LocalRequest
) -> tuple[dict[str, Any], CheckedRequest]:
    """Return inputs as arrays, and the front's check; raise ModelCallError or WrongCall."""
    arrays = input_arrays(spec, request.inputs)
    tensors = []
    for name, array in arrays.items():
        if (datatype := datatype_of(array.dtype)) == BYTES:
            data = encode_bytes(array.ravel().tolist())
        else:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()
        tensors.append(InputTensor(name, datatype, array.shape, data))
    outputs = tuple(request.requested_outputs)
    asked = InferRequest(
        spec.name, "", request.request_id, dict(request.parameters), tensors, outputs, request.timeout_s
    )
    asked.sequence = None if request.sequence is None else RequestSequence(*request.sequence)
    try:
        return arrays, check.check(asked)
    except InvalidArgument as error:
        raise ModelCallError(error.code.value, str(error)) from None


def _input_array(name: str, value: Any, datatype: str | None) -> Any:
    try:
        is_array = isinstance(value, np.ndarray | np.generic) or datatype is None
        array = np.asarray(value, dtype=None if is_array else numpy_dtype(str(datatype)))
        if array.dtype.kind in "US" or datatype_of(array.dtype) == BYTES:
            elements = [
                one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel().tolist()
            ]
            return np.array(elements, dtype=object).reshape(array.shape)
    except (ValueError, TypeError) as error:
        raise WrongCall(f"input {name!r}: {error}") from None
    return array


class Outputs(dict[str, Any]):
    """The outputs of one response, numpy arrays by name, and its ``parameters``."""

    def __init__(self, arrays: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.parameters = dict(parameters)

    def _repr_html_(self) -> str:
        return arrays_html(self, self.parameters)


def batch_answers(
    checked: BatchAnswers, requests: Sequence[WireRequest]
) -> Iterator[Outputs | ModelCallError | None]:
    """Yield the answer to each request of a batch: outputs, an error, or None for no response."""
    parameters: Sequence[Mapping[str, Any]] = checked.parameters or [{} for _ in requests]
    if checked.whole is not None:
        columns = {
            one.name: _request_arrays(one, [request.rows for request in requests]) for one in checked.whole
        }
        for position, (request, given) in enumerate(zip(requests, parameters, strict=True)):
            arrays = {name: column[position] for name, column in columns.items()}
            yield _requested_outputs(arrays, request, given)
        return
    for one, request, given in zip(checked.each or (), requests, parameters, strict=True):
        if one is None:
            yield None
        elif isinstance(one, WireFailure):
            yield ModelCallError(*one)
        else:
            yield _requested_outputs({out.name: _output_array(out) for out in one}, request, given)


def _requested_outputs(
    arrays: Mapping[str, Any], request: WireRequest, parameters: Mapping[str, Any]
) -> Outputs:
    wanted = request.requested_outputs or tuple(arrays)
    return Outputs({name: arrays[name] for name in wanted if name in arrays}, parameters)


def _request_arrays(output: CheckedOutput, rows: Sequence[int]) -> list[Any]:
    if output.shape and not isinstance(output.shape[0], int):
        flat = np.concatenate([np.asarray(part, dtype=output.dtype).reshape(-1) for part in output.parts])
        return list(RaggedTensor(flat, output.shape, ()))
    whole, ends = _output_array(output), list(itertools.accumulate(rows))
    if len(rows) == 1:  # which may have no batch axis
        return [whole]
    return [whole[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def _output_array(output: CheckedOutput) -> Any:
    if output.datatype == BYTES:
        elements = decode_bytes(b"".join(output.parts), int(np.prod(output.shape)))
        return np.array(elements, dtype=object).reshape(output.shape)
    parts = [np.asarray(part, dtype=output.dtype) for part in output.parts]
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return joined.reshape(output.shape).copy()
