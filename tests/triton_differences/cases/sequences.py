"""Requests of a sequence: section 2.3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton_differences.steps import Case, case, stream
from triton_differences.tensors import In, Inference, grpc_raw, http_json, raw_message


def _add(value: int, sequence: Any = None, rows: int = 1, **flags: bool) -> Inference:
    parameters = {} if sequence is None else {"sequence_id": sequence}
    parameters |= {f"sequence_{name}": value for name, value in flags.items()}
    return Inference(
        "accumulate", [In("INPUT", "INT32", [rows, 1], [value] * rows)], parameters=parameters, id="q"
    )


def cases() -> Iterator[Case]:
    whole = (_add(1, 7, start=True), _add(2, 7), _add(3, 7, end=True))
    yield case("http sequence", *map(http_json, whole))
    yield case("grpc sequence", *map(grpc_raw, whole))
    yield case("stream sequence", stream(*map(raw_message, whole)))
    two = (_add(1, 8, start=True), _add(5, 9, start=True), _add(1, 8, end=True), _add(5, 9, end=True))
    yield case("grpc two sequences", *map(grpc_raw, two))
    yield case("grpc start on an active sequence", *map(grpc_raw, (_add(1, 10, start=True), *whole)))
    for written in (http_json, grpc_raw):
        of = written.__name__
        yield case(f"{of} without an id", written(_add(1)))
        yield case(f"{of} id of zero", written(_add(1, 0, start=True)))
        yield case(f"{of} without a start", written(_add(1, 55)))
        yield case(f"{of} after the end", *map(written, (_add(1, 11, start=True, end=True), _add(2, 11))))
        yield case(f"{of} two rows", written(_add(1, 12, 2, start=True, end=True)))
        yield case(f"{of} id as text", written(_add(1, "twelve", start=True, end=True)))
        control = Inference(
            "accumulate", [In("INPUT", "INT32", [1, 1], [1]), In("START", "INT32", [1, 1], [1])]
        )
        yield case(f"{of} control input sent", written(control))
