"""generate and generate_stream: section 2.14."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton_differences.steps import Case, case, post

_BODIES: dict[str, tuple[str, Any]] = {
    "one string": ("shout", {"PROMPT": "abc"}),
    "list of one": ("shout", {"PROMPT": ["abc"]}),
    "list of two": ("shout", {"PROMPT": ["abc", "def"]}),
    "empty list": ("shout", {"PROMPT": []}),
    "nested list": ("shout", {"PROMPT": [["abc"]]}),
    "id": ("shout", {"PROMPT": "abc", "id": "seven"}),
    "id empty": ("shout", {"PROMPT": "abc", "id": ""}),
    "id as number": ("shout", {"PROMPT": "abc", "id": 7}),
    "other parameters": ("shout", {"PROMPT": "abc", "a": 1, "b": "x", "c": True, "d": 1.5}),
    "parameter null": ("shout", {"PROMPT": "abc", "a": None}),
    "parameter list": ("shout", {"PROMPT": "abc", "a": [1]}),
    "parameters object": ("shout", {"PROMPT": "abc", "parameters": {"a": 1}}),
    "input in parameters": ("shout", {"parameters": {"PROMPT": "abc"}}),
    "parameters as list": ("shout", {"PROMPT": "abc", "parameters": []}),
    "parameters in parameters": ("shout", {"PROMPT": "abc", "parameters": {"parameters": {"a": 1}}}),
    "reserved parameter": ("shout", {"PROMPT": "abc", "triton_other": 1}),
    "number for a string": ("shout", {"PROMPT": 1}),
    "bool for a string": ("shout", {"PROMPT": True}),
    "null for a string": ("shout", {"PROMPT": None}),
    "object for a string": ("shout", {"PROMPT": {"a": 1}}),
    "input twice": ("shout", b'{"PROMPT":"a","PROMPT":"b"}'),
    "missing input": ("shout", {}),
    "not JSON": ("shout", b"{"),
    "list": ("shout", []),
    "no body": ("shout", b""),
    "unknown model": ("unknown", {"PROMPT": "abc"}),
    "not loaded": ("unloaded", {"x": 1}),
    "one response": ("text", {"PROMPT": "abc"}),
    "no response": ("text", {"PROMPT": "abc", "COUNT": 0}),
    "three responses": ("text", {"PROMPT": "abc", "COUNT": 3}),
    "text for a number": ("text", {"PROMPT": "abc", "COUNT": "3"}),
    "float for an integer": ("text", {"PROMPT": "abc", "COUNT": 1.0}),
    "missing beside an optional": ("text", {}),
    "several elements": ("echo_FP32", {"x": [1, 2.5]}),
    "one element": ("echo_FP32", {"x": 2}),
    "no elements": ("echo_FP32", {"x": []}),
    "integers": ("echo_INT64", {"x": [1, -2]}),
    "bools": ("echo_BOOL", {"x": [True, False]}),
    "half": ("echo_FP16", {"x": [1.0]}),
    "two inputs": ("simple", {"INPUT0": list(range(16)), "INPUT1": [1] * 16}),
    "elements that do not fit": ("simple", {"INPUT0": [1, 2], "INPUT1": [1] * 16}),
    "two variable dimensions": ("two_variable", {"x": [1.0]}),
    "model refused": ("fails", {"x": 0}),
    "model unavailable": ("fails", {"x": 2}),
    "model raised": ("fails", {"x": 6}),
}


def cases() -> Iterator[Case]:
    for verb in ("generate", "generate_stream"):
        for name, (model, body) in _BODIES.items():
            yield case(f"{verb}: {name}", post(f"/v2/models/{model}/{verb}", body))
        yield case(f"{verb}: version", post(f"/v2/models/shout/versions/1/{verb}", {"PROMPT": "a"}))
        yield case(f"{verb}: unknown version", post(f"/v2/models/shout/versions/9/{verb}", {"PROMPT": "a"}))
