"""Bodies that a loaded model takes and gives, made of its declaration, for the OpenAPI document. Pure. Large
tensors are left empty (see ``left_out``). FP16 and BF16 have no JSON form, and so no example.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec, element_count

#: A tensor of more elements is left empty.
MAX_SHOWN_ELEMENTS: Final = 64
_NO_JSON: Final = frozenset({"FP16", "BF16"})
_VALUES: Final[dict[str, Any]] = {"BOOL": True, "FP32": 1.0, "FP64": 1.0, "BYTES": "text"}
_TYPES: Final = {"BOOL": "boolean", "FP32": "number", "FP64": "number", "BYTES": "string"}


def without_json(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The tensors that only binary data can carry."""
    return [one for one in tensors if one.datatype in _NO_JSON]


def infer_request(spec: ModelSpec) -> dict[str, Any]:
    return {"id": "1", "inputs": [_tensor(one, spec) for one in spec.inputs]}


def infer_response(spec: ModelSpec) -> dict[str, Any]:
    head = {"model_name": spec.name, "model_version": str(spec.version), "id": "1"}
    return {**head, "outputs": [_tensor(one, spec) for one in spec.outputs]}


def generate_request(spec: ModelSpec) -> dict[str, Any]:
    return {one.name: _member(one, spec) for one in spec.inputs}


def generate_response(spec: ModelSpec) -> dict[str, Any]:
    head = {"model_name": spec.name, "model_version": str(spec.version)}
    return {**head, **{one.name: _member(one, spec) for one in spec.outputs}}


def generate_schema(spec: ModelSpec) -> dict[str, Any]:
    """The schema of a body for ``/generate``: a value or an array for each input."""
    members: dict[str, Any] = {
        "type": "object",
        "properties": {one.name: _member_schema(one) for one in spec.inputs},
    }
    required = [one.name for one in spec.inputs if not one.optional]
    return {**members, "required": required} if required else members


def left_out(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """The inputs that the examples leave empty: how many elements belong there, and one of them."""
    counts = {one.name: (element_count(_shape(one, spec)), _value(one)) for one in spec.inputs}
    return {
        name: {"elements": count, "value": value}
        for name, (count, value) in counts.items()
        if count > MAX_SHOWN_ELEMENTS
    }


def _tensor(tensor: TensorSpec, spec: ModelSpec) -> dict[str, Any]:
    shape = _shape(tensor, spec)
    return {
        "name": tensor.name,
        "shape": list(shape),
        "datatype": tensor.datatype,
        "data": _data(tensor, shape),
    }


def _member(tensor: TensorSpec, spec: ModelSpec) -> Any:
    data = _data(tensor, _shape(tensor, spec))
    return data[0] if len(data) == 1 else data


def _data(tensor: TensorSpec, shape: tuple[int, ...]) -> list[Any]:
    count = element_count(shape)
    return [_value(tensor)] * count if count <= MAX_SHOWN_ELEMENTS else []


def _shape(tensor: TensorSpec, spec: ModelSpec) -> tuple[int, ...]:
    """A complete shape that the declaration allows, a batch of one included."""
    batch = (1,) if spec.max_batch_size else ()
    return batch + tuple(1 if dim == -1 else dim for dim in tensor.shape)


def _value(tensor: TensorSpec) -> Any:
    return _VALUES.get(tensor.datatype, 1)


def _member_schema(tensor: TensorSpec) -> dict[str, Any]:
    element = {"type": _TYPES.get(tensor.datatype, "integer")}
    described = f"{tensor.datatype} {list(tensor.shape)}"
    return {"description": described, "anyOf": [element, {"type": "array"}]}
