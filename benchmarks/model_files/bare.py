"""The runtime of a file in a loop, without a server, at its defaults:
``python -m benchmarks.model_files.bare NAME FILE SECONDS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.model_files.files import FILES, ModelFile

_WARM_UP = 3


def call_of(file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """What computes one batch."""
    return _RUNTIMES[file.runtime](path)


def _onnxruntime(path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda rows: np.asarray(session.run(None, {"x": rows})[0])


def _torch(path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    import torch

    module = torch.export.load(path).module()

    def call(rows: NDArray[Any]) -> NDArray[Any]:
        with torch.inference_mode():
            return np.asarray(module(torch.from_numpy(rows)))

    return call


_RUNTIMES: dict[str, Callable[[str], Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "onnxruntime": _onnxruntime,
    "torch": _torch,
}


def main(name: str, path: str, seconds: str) -> None:
    file = next(one for one in FILES if one.name == name)
    call, rows = call_of(file, path), file.rows
    for _ in range(_WARM_UP):
        call(rows)
    batches, began, began_cpu = 0, time.perf_counter(), time.process_time()
    while (took_s := time.perf_counter() - began) < float(seconds):
        call(rows)
        batches += 1
    result = {"batches": batches, "took_s": took_s, "cpu_s": time.process_time() - began_cpu}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
