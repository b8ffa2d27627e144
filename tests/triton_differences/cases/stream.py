"""ModelStreamInfer: section 1.3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton_differences.steps import Case, case, stream
from triton_differences.tensors import In, Inference, contents_message, raw_message

_EMPTY_FINAL = {"triton_enable_empty_final_response": True}
#: Refusals that Triton sends when it gets to it; all others are in the order of the requests.
_UNORDERED = ("decoupled of a wrong datatype",)
_STRICT = (("triton_grpc_error", "true"),)


def _repeat(count: int, **more: Any) -> Any:
    return raw_message(Inference("repeat", [In("count", "INT32", [1], [count])], **more))


def _simple(**more: Any) -> Any:
    inputs = [In(f"INPUT{one}", "INT32", [1, 16], range(16)) for one in range(2)]
    return contents_message(Inference("simple", inputs, **more))


def cases() -> Iterator[Case]:
    yield case("stream of nothing", stream())
    yield case("stream of one", stream(_simple(id="a")))
    yield case("stream of three", stream(*(_simple(id=str(number)) for number in range(3))))
    yield case("stream with empty final", stream(_simple(id="a", parameters=_EMPTY_FINAL)))
    yield case(
        "stream with empty final refused",
        stream(_simple(id="a", parameters={next(iter(_EMPTY_FINAL)): False})),
    )
    for count in (0, 1, 3):
        yield case(f"stream decoupled {count}", stream(_repeat(count, id="a")))
        yield case(
            f"stream decoupled {count}, empty final", stream(_repeat(count, id="a", parameters=_EMPTY_FINAL))
        )
        yield case(
            f"stream decoupled {count}, version", stream(_repeat(count, version="1", parameters=_EMPTY_FINAL))
        )
    yield from _errors()


def _errors() -> Iterator[Case]:
    for name, wrong in {
        "unknown model": raw_message(Inference("unknown", id="w")),
        "not loaded": raw_message(Inference("unloaded", id="w")),
        "bad version": _simple(id="w", version="x"),
        "no inputs": raw_message(Inference("simple", id="w")),
        "no data": _without_data(),
        "wrong shape": raw_message(Inference("simple", [In("INPUT0", "INT32", [2], [1, 2])], id="w")),
        "reserved parameter": _simple(id="w", parameters={"triton_other": 1}),
        "model refused": raw_message(Inference("fails", [In("x", "INT32", [1], [0])], id="w")),
        "model raised": raw_message(Inference("fails", [In("x", "INT32", [1], [6])], id="w")),
        "decoupled of a wrong datatype": raw_message(
            Inference("repeat", [In("count", "FP32", [1], [1])], id="w")
        ),
    }.items():
        yield case(f"stream error: {name}", stream(wrong))
        yield case(f"stream error, then good: {name}", stream(wrong, _simple(id="g")))
        if name not in _UNORDERED:
            yield case(f"stream good, then error: {name}", stream(_simple(id="g"), wrong, _simple(id="h")))
        yield case(f"stream error as status: {name}", stream(wrong, metadata=_STRICT))
    yield case("stream without errors as status", stream(_simple(id="g"), metadata=_STRICT))


def _without_data() -> Any:
    inputs = [In(f"INPUT{one}", "INT32", [1, 16]) for one in range(2)]
    return contents_message(Inference("simple", inputs, id="w"))
