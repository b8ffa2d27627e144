"""Prints, for several ways to make an output on the GPU, whether the worker takes it for one that the
callable may write to again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import cupy

from gpuserve.decorators import batch
from gpuserve_worker.cuda.device.device import open_device
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.outputs import OutputRules
from gpuserve_worker.protocol.payloads import WireRequest
from gpuserve_worker.protocol.tensor import TensorSpec


def cases(zeros: Callable[[int, int], Any]) -> dict[str, Callable[[], Any]]:
    """For an array library, by what makes a new array there."""
    static = zeros(4, 4)
    return {
        "new": lambda: zeros(4, 4) + 1,
        "new, reshaped": lambda: (zeros(2, 8) + 1).reshape(4, 4),
        "kept": lambda: static,
        "part of kept": lambda: static[:4],
        "computed from kept": lambda: static * 2,
    }


def main() -> None:
    device = open_device()
    rules = OutputRules(
        "m", [TensorSpec("y", "FP32", (4,))], batching=True, strict=False, reader=device.arrays
    )

    def is_kept(result: Any) -> bool:
        (output,) = rules.check(result, [WireRequest(4, {}, ())]).whole or ()
        return output.is_kept

    libraries = {"cupy": cases(lambda *shape: cupy.zeros(shape, "float32"))}
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            libraries["torch"] = cases(lambda *shape: torch.zeros(shape, device="cuda"))
    for library, made in libraries.items():
        for name, make in made.items():
            print(library, name, is_kept([{"y": make()}]), is_kept(_decorated(make)), sep=": ")


def _decorated(make: Callable[[], Any]) -> Any:
    """What it comes to under ``@batch``."""

    @batch
    def call(**inputs: Any) -> dict[str, Any]:
        return {"y": make()}

    return call(Batch({}, [WireRequest(4, {}, ())], ("y",), True))


if __name__ == "__main__":
    main()
