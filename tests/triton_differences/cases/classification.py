"""Outputs as the k largest values and their labels: section 2.2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton_differences.steps import Case, case
from triton_differences.tensors import In, Inference, Out, grpc_raw, http_binary, http_json

_VALUES = (0.5, 3.0, -1.0, 2.25)


def _request(model: str, count: Any, datatype: str = "FP32", rows: int = 1) -> Inference:
    values = [int(one) for one in _VALUES] if "INT" in datatype else _VALUES
    named = ("a", "b", "c", "d") if datatype == "BYTES" else tuple(values)
    named = (True, False, True, False) if datatype == "BOOL" else named
    tensor = In("x", datatype, [rows, 4], named * rows)
    return Inference(model, [tensor], [Out("y", {"classification": count})])


def cases() -> Iterator[Case]:
    for count in (1, 2, 4, 10, 0, -1, "2", True, 1.5):
        yield case(f"http classification {count!r}", http_json(_request("labelled", count)))
        yield case(f"grpc classification {count!r}", grpc_raw(_request("labelled", count)))
    yield case("http classification of two rows", http_json(_request("labelled", 2, rows=2)))
    yield case("http classification binary", http_binary(_request("labelled", 2)))
    for datatype in ("INT32", "UINT8", "INT64", "FP64", "FP16", "BF16", "BOOL", "BYTES"):
        yield case(f"grpc classification of {datatype}", grpc_raw(_request(f"echo_{datatype}", 2, datatype)))
    flat = Inference("flat", [In("x", "FP32", [2, 2], _VALUES)], [Out("y", {"classification": 3})])
    yield case("http classification without a batch", http_json(flat))
    yield case("grpc classification without a batch", grpc_raw(flat))
