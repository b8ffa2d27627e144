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
    return _RUNTIMES[file.runtime](file, path)


def _onnxruntime(_file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda rows: np.asarray(session.run(None, {"x": rows})[0])


def _sklearn(file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    import skops.io

    estimator = skops.io.load(path, trusted=list(file.trusted))
    return lambda rows: np.asarray(estimator.predict_proba(rows))


def _transformers(_file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    from transformers import pipeline

    classify = pipeline("text-classification", model=path, top_k=None)
    labels = list(classify.model.config.label2id)

    def call(rows: NDArray[Any]) -> NDArray[Any]:
        texts = [one.decode() for one in rows[:, 0]]
        found = classify(texts, batch_size=len(texts))
        scores = [{one["label"]: one["score"] for one in row} for row in found]
        return np.array([[row[label] for label in labels] for row in scores])

    return call


def _torch(_file: ModelFile, path: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    import torch

    module = torch.export.load(path).module()

    def call(rows: NDArray[Any]) -> NDArray[Any]:
        with torch.inference_mode():
            return np.asarray(module(torch.from_numpy(rows)))

    return call


_RUNTIMES: dict[str, Callable[[ModelFile, str], Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "onnxruntime": _onnxruntime,
    "sklearn": _sklearn,
    "torch": _torch,
    "transformers": _transformers,
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
