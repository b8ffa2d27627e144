"""Every datatype in every encoding, with the values at its edges: sections 0.2 and 1.2."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from triton_differences.model_table import DATATYPES
from triton_differences.steps import Case, call, case
from triton_differences.tensors import (
    ENCODINGS,
    In,
    Inference,
    Out,
    contents_message,
    grpc_contents,
    grpc_raw,
    http_binary,
    http_json,
)

_SPECIAL: dict[str, Sequence[Any]] = {
    "BOOL": [True, False, True],
    "BYTES": ["", "abc", "é"],
    "FP16": [0.5, -1.5, 65504.0],
    "BF16": [0.5, -1.5, 1.0],
    "FP32": [0.5, -1.5, 16777216.0],
    "FP64": [0.5, -1.5, 1e300],
}
_NOT_STRINGS = {
    "length of two bytes": b"\x01\x00",
    "length without its bytes": struct.pack("<I", 5) + b"ab",
    "one string for two": struct.pack("<I", 1) + b"a",
    "three strings for two": (struct.pack("<I", 1) + b"a") * 3,
    "nothing": b"",
    "huge length": struct.pack("<I", 2**32 - 1) + b"ab",
    "two empty strings": bytes(8),
    "bytes that are no text": (struct.pack("<I", 2) + b"\xff\x00") * 2,
}


def _edges(datatype: str) -> Sequence[Any]:
    if datatype in _SPECIAL:
        return _SPECIAL[datatype]
    bits = int(datatype.lstrip("UINT"))
    return [0, 1, 2**bits - 1] if datatype.startswith("U") else [-(2 ** (bits - 1)), 0, 2 ** (bits - 1) - 1]


def cases() -> Iterator[Case]:
    for datatype in DATATYPES:
        request = Inference(f"echo_{datatype}", [In("x", datatype, [1, 3], _edges(datatype))])
        for encoding, written in ENCODINGS.items():
            yield case(f"{encoding}: {datatype}", written(request))
    for name, raw in _NOT_STRINGS.items():
        strings = Inference("echo_BYTES", [In("x", "BYTES", [1, 2], raw=raw)])
        yield case(f"http binary: strings, {name}", http_binary(strings))
        yield case(f"grpc raw: strings, {name}", grpc_raw(strings))
    yield from _json_values()
    yield from _contents()


def _json_values() -> Iterator[Case]:
    for datatype, values in (
        ("BOOL", [0, 1]),
        ("BOOL", ["true", "false"]),
        ("INT32", [1.5, 2]),
        ("INT32", ["1", "2"]),
        ("INT32", [True, False]),
        ("INT32", [None, 1]),
        ("INT32", [2**31, 1]),
        ("UINT32", [-1, 1]),
        ("INT8", [300, 1]),
        ("UINT64", [2**64, 1]),
        ("FP32", [1, 2]),
        ("FP32", ["1.5", 2]),
        ("FP32", [1e60, 2]),
        ("FP32", [float("nan"), float("inf")]),
        ("BYTES", [1, 2]),
        ("BYTES", ["a\x00b", "\ud83d\ude00"]),
    ):
        text = repr(values).encode("ascii", "replace").decode()
        yield case(f"http json: {datatype} from {text}", http_json(_two(datatype, values)))
    special = struct.pack("<ff", float("nan"), float("-inf"))
    to_json = Inference("echo_FP32", [In("x", "FP32", [1, 2], raw=special)])
    yield case("http binary: FP32 not finite", http_binary(to_json))
    yield case("grpc raw: FP32 not finite", grpc_raw(to_json))


def _two(datatype: str, values: Sequence[Any]) -> Inference:
    return Inference(f"echo_{datatype}", [In("x", datatype, [1, 2], values)])


def _contents() -> Iterator[Case]:
    both = contents_message(_two("FP32", [1, 2]))
    both.raw_input_contents.append(bytes(8))
    yield case("grpc: contents and raw", call("ModelInfer", both))
    two_fields = contents_message(_two("FP32", [1, 2]))
    two_fields.inputs[0].contents.int_contents.extend([1, 2])
    yield case("grpc: contents of two kinds", call("ModelInfer", two_fields))
    for datatype, field in (
        ("FP32", "int_contents"),
        ("INT32", "fp32_contents"),
        ("BYTES", "int64_contents"),
    ):
        wrong = contents_message(Inference(f"echo_{datatype}", [In("x", datatype, [1, 2])]))
        getattr(wrong.inputs[0].contents, field).extend([1, 2])
        yield case(f"grpc: {field} for {datatype}", call("ModelInfer", wrong))
    for datatype, value in (("INT8", 300), ("UINT8", 300), ("INT16", -40000)):
        yield case(f"grpc: contents {datatype} of {value}", grpc_contents(_two(datatype, [value, 1])))
    surplus = contents_message(Inference("echo_FP32", [In("x", "FP32", [1, 2])]))
    surplus.raw_input_contents.extend([bytes(8), bytes(8)])
    yield case("grpc: surplus raw contents", call("ModelInfer", surplus))
    missing = contents_message(Inference("echo_FP32", [In("x", "FP32", [1, 2])]))
    yield case("grpc: no contents at all", call("ModelInfer", missing))
    mixed = contents_message(
        Inference(
            "simple",
            [In("INPUT0", "INT32", [1, 16], range(16)), In("INPUT1", "INT32", [1, 16])],
            [Out("OUTPUT0")],
        )
    )
    yield case("grpc: contents for one input of two", call("ModelInfer", mixed))
    mixed.raw_input_contents.append(bytes(64))
    yield case("grpc: contents for one, raw for the other", call("ModelInfer", mixed))
