"""The JSON of an inference: its members, their types, and where the data may be: sections 1.5 and 1.6."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from triton_differences.steps import Case, case, post

_PATH = "/v2/models/echo_FP32/infer"
_X = {"name": "x", "shape": [1, 2], "datatype": "FP32"}
_GOOD = {**_X, "data": [1, 2]}


def _nested(levels: int) -> Any:
    data: Any = [1, 2]
    for _ in range(levels):
        data = [data]
    return data


_INPUTS: dict[str, Any] = {
    "good": [_GOOD],
    "nested data": [{**_X, "data": [[1, 2]]}],
    "data 50 deep": [{**_X, "data": _nested(50)}],
    "data 120 deep": [{**_X, "data": _nested(120)}],
    "data as a number": [{**_X, "data": 1}],
    "data as text": [{**_X, "data": "12"}],
    "data null": [{**_X, "data": None}],
    "data empty": [{**_X, "data": []}],
    "no data": [_X],
    "data and size": [{**_GOOD, "parameters": {"binary_data_size": 8}}],
    "data and region": [{**_GOOD, "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}}],
    "size without header": [{**_X, "parameters": {"binary_data_size": 8}}],
    "size as text": [{**_X, "parameters": {"binary_data_size": "8"}}],
    "size negative": [{**_X, "parameters": {"binary_data_size": -8}}],
    "no name": [{"shape": [1, 2], "datatype": "FP32", "data": [1, 2]}],
    "no shape": [{"name": "x", "datatype": "FP32", "data": [1, 2]}],
    "no datatype": [{"name": "x", "shape": [1, 2], "data": [1, 2]}],
    "name as number": [{**_GOOD, "name": 1}],
    "shape as text": [{**_GOOD, "shape": "1,2"}],
    "shape of text": [{**_GOOD, "shape": ["1", "2"]}],
    "shape of floats": [{**_GOOD, "shape": [1.0, 2.0]}],
    "datatype as number": [{**_GOOD, "datatype": 1}],
    "unknown member": [{**_GOOD, "other": 1}],
    "unknown parameter": [{**_GOOD, "parameters": {"other": 1}}],
    "parameters as list": [{**_GOOD, "parameters": []}],
    "input as text": ["x"],
    "inputs as object": _GOOD,
    "inputs null": None,
}
_DOCUMENTS: dict[str, Any] = {
    "id as number": {"id": 1},
    "id empty": {"id": ""},
    "id null": {"id": None},
    "id with quotes": {"id": 'a"b\\c\u00e9'},
    "unknown member": {"other": 1},
    "parameters as list": {"parameters": []},
    "parameters null": {"parameters": None},
    "outputs empty": {"outputs": []},
    "outputs as object": {"outputs": {}},
    "output as text": {"outputs": ["y"]},
    "output without name": {"outputs": [{}]},
    "output binary": {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]},
    "output not binary": {"outputs": [{"name": "y", "parameters": {"binary_data": False}}]},
    "output binary as number": {"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
    "binary_data_output": {"parameters": {"binary_data_output": True}},
    "binary_data_output and listed": {"parameters": {"binary_data_output": True}, "outputs": [{"name": "y"}]},
    "binary_data_output as number": {"parameters": {"binary_data_output": 1}},
}
_TEXTS: dict[str, bytes] = {
    "not JSON": b"{",
    "text": b"hello",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "empty object": b"{}",
    "no inputs": b'{"id":"a"}',
    "more behind": json.dumps({"inputs": [_GOOD]}).encode() + b"x",
    "blanks around": b"  " + json.dumps({"inputs": [_GOOD]}).encode() + b"\n",
    "not UTF-8": b'{"id":"\xff","inputs":[]}',
    "byte order mark": b"\xef\xbb\xbf" + json.dumps({"inputs": [_GOOD]}).encode(),
    "member twice": b'{"id":"a","id":"b","inputs":[' + json.dumps(_GOOD).encode() + b"]}",
    "comment": b"/* x */ {}",
    "deep": b'{"inputs":' + b"[" * 100_000,
}


def cases() -> Iterator[Case]:
    for name, inputs in _INPUTS.items():
        yield case(f"http inputs: {name}", post(_PATH, {"inputs": inputs}))
    for name, members in _DOCUMENTS.items():
        yield case(f"http request: {name}", post(_PATH, {**members, "inputs": [_GOOD]}))
    for name, text in _TEXTS.items():
        yield case(f"http body: {name}", post(_PATH, text))
