"""Callables with a ragged input, one for each form in which a callable receives it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuserve.decorators import batch


def _outputs(total: Any, twice: Any, rows: int) -> dict[str, Any]:
    return {"total": total, "twice": twice, "rows": np.full((rows, 1), rows, np.int32)}


@batch(pad=0, lengths="n", max_length=100_000)
def padded(x: Any, n: Any) -> Any:
    assert x.shape[1] == max(n)
    return _outputs(x.sum(axis=1, keepdims=True), 2 * x, len(x))


@batch(pad=-1, side="left", pad_to_multiple_of=8, lengths="n")
def on_the_left(x: Any, n: Any) -> Any:
    assert x.shape[1] % 8 == 0
    total = [[row[len(row) - length :].sum()] for row, length in zip(x, n, strict=True)]
    return _outputs(np.array(total, np.float32), 2 * x, len(x))


@batch
def rows(x: Any) -> Any:
    return _outputs(np.array([[one.sum()] for one in x], np.float32), [2 * one for one in x], len(x))


def requests(given: Any) -> Any:
    return [
        _outputs(one["x"].sum(axis=1, keepdims=True), 2 * one["x"], len(one["x"]))
        | {"rows": np.full((len(one["x"]), 1), sum(len(other["x"]) for other in given), np.int32)}
        for one in given
    ]
