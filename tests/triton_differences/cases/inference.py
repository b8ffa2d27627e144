"""Right and wrong requests for an inference, in each of the four encodings: sections 0.5 and 1.2."""

from __future__ import annotations

from collections.abc import Iterator

from triton_differences.steps import Case, case
from triton_differences.tensors import ENCODINGS, In, Inference, Out

_ROW = tuple(range(16))
_A, _B = In("INPUT0", "INT32", [1, 16], _ROW), In("INPUT1", "INT32", [1, 16], _ROW)


def _simple(*inputs: In, **more: object) -> Inference:
    return Inference("simple", inputs, **more)  # type: ignore[arg-type]


def _echo(*shape: int, values: tuple[float, ...] = (), datatype: str = "FP32", name: str = "x") -> Inference:
    return Inference("echo_FP32", [In(name, datatype, shape, values)])


REQUESTS: dict[str, Inference] = {
    "good": _simple(_A, _B),
    "inputs in another order": _simple(_B, _A),
    "id": _simple(_A, _B, id="seven"),
    "version": _simple(_A, _B, version="1"),
    "version that is not there": _simple(_A, _B, version="3"),
    "two rows": _simple(In("INPUT0", "INT32", [2, 16], _ROW * 2), In("INPUT1", "INT32", [2, 16], _ROW * 2)),
    "one output": _simple(_A, _B, outputs=[Out("OUTPUT1")]),
    "outputs in another order": _simple(_A, _B, outputs=[Out("OUTPUT1"), Out("OUTPUT0")]),
    "unknown model": Inference("unknown", [_A]),
    "model not loaded": Inference("unloaded", [In("x", "FP32", [1], [1.0])]),
    "no inputs": _simple(),
    "one input missing": _simple(_A),
    "one input missing, with id": _simple(_A, id="seven"),
    "optional given": Inference("optional", [In("a", "FP32", [1, 1], [1.0]), In("b", "FP32", [1, 1], [2.0])]),
    "optional left out": Inference("optional", [In("a", "FP32", [1, 1], [1.0])]),
    "only the optional": Inference("optional", [In("b", "FP32", [1, 1], [1.0])]),
    "optional and none": Inference("optional"),
    "unknown input": _simple(_A, In("OTHER", "INT32", [1, 16], _ROW)),
    "surplus input": _simple(_A, _B, In("OTHER", "INT32", [1, 16], _ROW)),
    "input twice": _simple(_A, _A),
    "input thrice": _simple(_A, _B, _B),
    "unknown output": _simple(_A, _B, outputs=[Out("OTHER")]),
    "output twice": _simple(_A, _B, outputs=[Out("OUTPUT0"), Out("OUTPUT0")]),
    "wrong datatype": _simple(In("INPUT0", "INT64", [1, 16], _ROW), _B),
    "wrong datatype of the same size": _simple(In("INPUT0", "UINT32", [1, 16], _ROW), _B),
    "unknown datatype": _echo(1, 2, values=(1, 2), datatype="FP99"),
    "empty datatype": _echo(1, 2, values=(1, 2), datatype=""),
    "lower-case datatype": _echo(1, 2, values=(1, 2), datatype="fp32"),
    "empty name": _echo(1, 2, values=(1, 2), name=""),
    "wrong size of a dimension": _simple(In("INPUT0", "INT32", [1, 15], _ROW[:15]), _B),
    "without the batch axis": _simple(In("INPUT0", "INT32", [16], _ROW), In("INPUT1", "INT32", [16], _ROW)),
    "empty shape": _simple(In("INPUT0", "INT32", [], [1]), _B),
    "one axis too many": _simple(In("INPUT0", "INT32", [1, 1, 16], _ROW), _B),
    "batch too large": _echo(9, 1, values=(1.0,) * 9),
    "batch of the largest size": _echo(8, 1, values=(1.0,) * 8),
    "batch of no rows": _echo(0, 4),
    "rows that differ": _simple(In("INPUT0", "INT32", [2, 16], _ROW * 2), _B),
    "no elements": _echo(1, 0),
    "too few elements": _echo(1, 4, values=(1, 2, 3)),
    "too many elements": _echo(1, 4, values=(1, 2, 3, 4, 5)),
    "negative dimension": _echo(1, -1, values=(1, 2)),
    "huge dimension": _echo(1, 2**62, values=(1, 2)),
    "huge shape": _echo(2**32, 2**32, values=(1, 2)),
    "flat": Inference("flat", [In("x", "FP32", [3, 2], range(6))]),
    "flat of a wrong shape": Inference("flat", [In("x", "FP32", [3, 3], range(9))]),
    "flat of a wrong rank": Inference("flat", [In("x", "FP32", [2], range(2))]),
    "flat without elements": Inference("flat", [In("x", "FP32", [0, 2])]),
    "decoupled model": Inference("repeat", [In("count", "INT32", [1], [1])]),
    **{f"failure {code}": Inference("fails", [In("x", "INT32", [1], [code])], id="f") for code in range(8)},
}


def cases() -> Iterator[Case]:
    for name, request in REQUESTS.items():
        for encoding, written in ENCODINGS.items():
            yield case(f"{encoding}: {name}", written(request))
