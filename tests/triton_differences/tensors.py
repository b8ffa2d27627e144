"""Inference requests said once and written in each encoding of the protocol. Pure.

``http_json``, ``http_binary``, ``grpc_contents`` and ``grpc_raw`` are the four. What is wrong in a request is
wrong in all of them: nothing is checked here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from tritonclient.grpc import service_pb2

from triton_differences.steps import HttpStep, UnaryStep, call, http

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_NUMPY = {"BOOL": "bool", "BF16": ml_dtypes.bfloat16, "FP16": "float16", "FP64": "float64"}


@dataclass(frozen=True, slots=True)
class In:
    """An input. ``raw`` replaces the bytes that ``values`` make."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Sequence[Any] = ()
    raw: bytes | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> bytes:
        """The tensor as it is in memory, little-endian."""
        return raw_bytes(self.datatype, self.values) if self.raw is None else self.raw


@dataclass(frozen=True, slots=True)
class Out:
    """A requested output."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inference:
    """A request for an inference. ``version`` "" is the latest."""

    model: str
    inputs: Sequence[In] = ()
    outputs: Sequence[Out] = ()
    id: str = ""
    version: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        version = f"/versions/{self.version}" if self.version else ""
        return f"/v2/models/{self.model}{version}/infer"


def raw_bytes(datatype: str, values: Sequence[Any]) -> bytes:
    """The elements in row-major order; BYTES with their lengths. An unknown datatype is taken for FP32."""
    if datatype == "BYTES":
        encoded = [one.encode() if isinstance(one, str) else one for one in values]
        return b"".join(len(one).to_bytes(4, "little") + one for one in encoded)
    if "INT" in datatype:
        width = int(datatype.lstrip("UINT")) // 8
        return b"".join((one % 256**width).to_bytes(width, "little") for one in values)
    return np.array(values, dtype=_NUMPY.get(datatype, "float32")).tobytes()


def http_json(one: Inference, **headers: str) -> HttpStep:
    """Tensors as JSON."""
    inputs = [_entry(tensor) | {"data": list(tensor.values)} for tensor in one.inputs]
    return http("POST", one.path, json.dumps(_document(one, inputs)).encode(), **headers)


def http_binary(one: Inference, **headers: str) -> HttpStep:
    """Tensors behind the JSON, and outputs too."""
    inputs = []
    for tensor in one.inputs:
        entry = _entry(tensor)
        entry["parameters"] = {**entry.get("parameters", {}), "binary_data_size": len(tensor.nbytes)}
        inputs.append(entry)
    document = _document(one, inputs)
    for entry in document.get("outputs", []):
        entry["parameters"] = {**entry.get("parameters", {}), "binary_data": True}
    if not one.outputs:
        document["parameters"] = {**document.get("parameters", {}), "binary_data_output": True}
    head = json.dumps(document).encode()
    body = head + b"".join(tensor.nbytes for tensor in one.inputs)
    return http("POST", one.path, body, inference_header_content_length=str(len(head)), **headers)


def _entry(tensor: In) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    return entry | ({"parameters": dict(tensor.parameters)} if tensor.parameters else {})


def _document(one: Inference, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {"id": one.id} if one.id else {}
    if one.parameters:
        document["parameters"] = dict(one.parameters)
    document["inputs"] = inputs
    if one.outputs:
        document["outputs"] = [
            {"name": output.name, **({"parameters": dict(output.parameters)} if output.parameters else {})}
            for output in one.outputs
        ]
    return document


def message(one: Inference) -> Any:
    """A ModelInferRequest without tensor data."""
    made = service_pb2.ModelInferRequest(model_name=one.model, model_version=one.version, id=one.id)
    _set_parameters(made.parameters, one.parameters)
    for tensor in one.inputs:
        added = made.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        _set_parameters(added.parameters, tensor.parameters)
    for output in one.outputs:
        _set_parameters(made.outputs.add(name=output.name).parameters, output.parameters)
    return made


def raw_message(one: Inference) -> Any:
    """A ModelInferRequest with its tensors in raw_input_contents."""
    made = message(one)
    made.raw_input_contents.extend(tensor.nbytes for tensor in one.inputs)
    return made


def contents_message(one: Inference) -> Any:
    """A ModelInferRequest with its tensors in contents; FP16 and BF16 have no field there and stay empty."""
    made = message(one)
    for tensor, into in zip(one.inputs, made.inputs, strict=True):
        if field_name := _CONTENTS.get(tensor.datatype):
            values = [one.encode() if isinstance(one, str) else one for one in tensor.values]
            getattr(into.contents, field_name).extend(values)
    return made


def _set_parameters(into: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        match value:
            case bool():
                into[name].bool_param = value
            case int():
                into[name].int64_param = value
            case float():
                into[name].double_param = value
            case str():
                into[name].string_param = value


def grpc_raw(one: Inference, **more: Any) -> UnaryStep:
    """ModelInfer with raw tensors."""
    return call("ModelInfer", raw_message(one), **more)


def grpc_contents(one: Inference, **more: Any) -> UnaryStep:
    """ModelInfer with explicit contents."""
    return call("ModelInfer", contents_message(one), **more)


ENCODINGS: Mapping[str, Callable[[Inference], HttpStep | UnaryStep]] = {
    "http json": http_json,
    "http binary": http_binary,
    "grpc contents": grpc_contents,
    "grpc raw": grpc_raw,
}
