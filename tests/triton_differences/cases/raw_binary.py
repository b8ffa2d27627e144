"""A body that is one tensor and nothing else: section 2.1.4."""

from __future__ import annotations

from collections.abc import Iterator

from triton_differences.steps import Case, case, post

_BODIES = {
    "any_length": (bytes(8), bytes(32), bytes(7), b""),
    "pair": (bytes(16), bytes(32), bytes(8)),
    "echo_INT32": (bytes(8),),
    "echo_FP32": (bytes(8), b""),
    "flat": (bytes(16), bytes(12), bytes(10)),
    "simple": (bytes(64),),
    "two_variable": (bytes(16),),
    "one_string": (b"hello", b""),
    "echo_BYTES": (b"hello",),
    "shout": (b"hello",),
    "optional": (bytes(4),),
    "repeat": (bytes(4),),
    "unknown": (bytes(4),),
}


def cases() -> Iterator[Case]:
    for model, bodies in _BODIES.items():
        for body in bodies:
            step = post(f"/v2/models/{model}/infer", body, inference_header_content_length="0")
            yield case(f"raw binary of {len(body)} bytes for {model}", step)
