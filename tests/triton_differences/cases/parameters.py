"""Parameters of a request, known and unknown ones: sections 2.3, 2.4 and 2.5."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton_differences.steps import Case, call, case
from triton_differences.tensors import In, Inference, grpc_raw, http_json, raw_message

_X = In("x", "INT32", [1], [1])
_SETS: dict[str, dict[str, Any]] = {
    "int": {"a": 1},
    "negative int": {"a": -1},
    "text": {"a": "b"},
    "bool": {"a": True},
    "float": {"a": 1.5},
    "all kinds": {"a": 1, "b": "x", "c": False, "d": 0.25},
    "empty name": {"": 1},
    "empty text": {"a": ""},
    "triton_ name": {"triton_other": 1},
    "triton_enable_empty_final_response": {"triton_enable_empty_final_response": True},
    "priority": {"priority": 1},
    "priority above all levels": {"priority": 1 << 32},
    "negative priority": {"priority": -1},
    "priority as text": {"priority": "1"},
    "timeout": {"timeout": 1_000_000},
    "small timeout": {"timeout": 1},
    "negative timeout": {"timeout": -1},
    "timeout as text": {"timeout": "1"},
    "timeout as bool": {"timeout": True},
    "sequence_id": {"sequence_id": 3, "sequence_start": True, "sequence_end": True},
    "sequence_id as text": {"sequence_id": "three"},
    "sequence_id as bool": {"sequence_id": True},
    "sequence_id negative": {"sequence_id": -3},
    "sequence_start as number": {"sequence_id": 1, "sequence_start": 1},
    "sequence_end as text": {"sequence_id": 1, "sequence_end": "true"},
    "headers": {"headers": "a"},
    "binary_data_output": {"binary_data_output": True},
}
_JSON_ONLY: dict[str, Any] = {
    "null": {"a": None},
    "list": {"a": [1]},
    "object": {"a": {"b": 1}},
    "large int": {"a": 2**63},
    "larger int": {"a": 2**64},
}


def cases() -> Iterator[Case]:
    for name, parameters in _SETS.items():
        request = Inference("parameters", [_X], parameters=parameters)
        yield case(f"http parameter: {name}", http_json(request))
        yield case(f"grpc parameter: {name}", grpc_raw(request))
    for name, parameters in _JSON_ONLY.items():
        yield case(f"http parameter: {name}", http_json(Inference("parameters", [_X], parameters=parameters)))
    for name in ("a", "priority", "timeout", "sequence_id"):
        message = raw_message(Inference("parameters", [_X]))
        message.parameters[name].uint64_param = 2
        yield case(f"grpc parameter: {name} as uint64", call("ModelInfer", message))
    unset = raw_message(Inference("parameters", [_X]))
    unset.parameters["a"].SetInParent()
    yield case("grpc parameter: without a value", call("ModelInfer", unset))
    on_input = In("x", "INT32", [1], [1], parameters={"other": "text"})
    for written in (http_json, grpc_raw):
        yield case(f"{written.__name__} parameter of an input", written(Inference("parameters", [on_input])))
