"""The generate extension: a plain JSON object to an ``InferRequest``, responses back to plain objects. Pure.
A key named like an input is that input, shaped to fit the model; all but ``id`` others are parameters.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor
from gpuserve.front.requests.json_values import (
    DuplicateKey,
    compact,
    described,
    loads,
    tensor_bytes,
    tensor_json,
)
from gpuserve.front.requests.limits import MAX_PARAMETERS, check_count, check_name, check_texts, shown
from gpuserve.front.requests.parameters import SEQUENCE_KEYS, json_sequence
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec, element_count

ONE_RESPONSE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)
_NESTED: Final = "parameters"
_SCALARS: Final = (bool, int, float, str)


def parse_generate_request(body: bytes, spec: ModelSpec, version: str) -> InferRequest:
    """The request of a JSON object; InvalidArgument: a member fits nothing; ResourceExhausted: too much."""
    try:
        document = loads(body)
    except DuplicateKey as error:
        raise _given_twice(error.key, spec) or error from None
    if not isinstance(document, dict):
        raise InvalidArgument("a generate request must be a JSON object of inputs and parameters")
    members = _flat(document, spec)
    inputs = [
        _input(tensor, members.pop(tensor.name), spec) for tensor in spec.inputs if tensor.name in members
    ]
    request_id = members.pop("id", "")
    if not isinstance(request_id, str):
        raise InvalidArgument(f"'id': expected a string, got {described(request_id)}")
    check_count("parameters", len(members), MAX_PARAMETERS, spec.name)
    sequence = json_sequence(members)
    for key in SEQUENCE_KEYS:
        members.pop(key, None)
    parameters = {key: _parameter(key, value, spec.name) for key, value in members.items()}
    check_texts(request_id, parameters)
    return InferRequest(spec.name, version, request_id, parameters, inputs, (), None, sequence=sequence)


def response_json(response: InferResponse) -> bytes:
    """A response as a JSON object; InvalidArgument: an output has no JSON form."""
    members = [
        f'"model_name":{compact(response.model_name)}',
        f'"model_version":{compact(response.model_version)}',
    ]
    if response.id:
        members.append(f'"id":{compact(response.id)}')
    members += [f"{compact(key)}:{compact(value)}" for key, value in response.parameters.items()]
    for output in response.outputs:
        text = b"".join(tensor_json(output.data, output.datatype, output.shape, output.name)).decode()
        if element_count(output.shape) == 1:
            text = text[1:-1]
        members.append(f"{compact(output.name)}:{text}")
    return f"{{{','.join(members)}}}".encode()


def _flat(document: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The members of the object and of its ``parameters`` together; an input of that name is one."""
    if _NESTED not in document or any(tensor.name == _NESTED for tensor in spec.inputs):
        return dict(document)
    members = dict(document)
    nested = members.pop(_NESTED)
    if not isinstance(nested, dict):
        raise InvalidArgument(f"'{_NESTED}': expected an object, got {described(nested)}")
    for key, value in nested.items():
        if key in members:
            twice = InvalidArgument(f"'{shown(key)}' is given twice, at the top and in '{_NESTED}'")
            raise _given_twice(key, spec) or twice
        members[key] = value
    return members


def _given_twice(key: str, spec: ModelSpec) -> InvalidArgument | None:
    """The error of an input that comes twice; None where the key is no input's."""
    if not any(tensor.name == key for tensor in spec.inputs):
        return None
    return InvalidArgument(f"input '{shown(key)}' already exists in request for model '{spec.name}'")


def _input(tensor: TensorSpec, value: Any, spec: ModelSpec) -> InputTensor:
    data = value if isinstance(value, list) else [value]
    count = _count(data)
    shape = _shape(tensor, count, spec)
    return InputTensor(
        tensor.name, tensor.datatype, shape, tensor_bytes(data, tensor.datatype, count, tensor.name)
    )


def _count(data: list[Any]) -> int:
    return sum(_count(one) if isinstance(one, list) else 1 for one in data)


def _shape(tensor: TensorSpec, count: int, spec: ModelSpec) -> tuple[int, ...]:
    """Fixed dimensions stay; the innermost open one takes what they leave, all other open ones are 1."""
    declared = (-1, *tensor.shape) if spec.max_batch_size else tensor.shape
    fixed = element_count([dim for dim in declared if dim != -1])
    innermost = max((axis for axis, dim in enumerate(declared) if dim == -1), default=None)
    rest = count // fixed if fixed else 0
    if rest * fixed != count or (innermost is None and rest != 1):
        raise InvalidArgument(
            f"The schema can not convert input '{tensor.name}' to tensor with proper shape: {count} elements "
            f"do not fit {list(declared)}"
        )
    return tuple(dim if dim != -1 else rest if axis == innermost else 1 for axis, dim in enumerate(declared))


def _parameter(key: str, value: Any, model_name: str) -> Any:
    check_name("parameter", key, model_name)
    if isinstance(value, _SCALARS):
        return value
    raise InvalidArgument(
        f"parameter '{shown(key)}' has invalid type. It should be either 'int', 'bool', or 'string'. "
        f"It is no input of model '{model_name}'."
    )
