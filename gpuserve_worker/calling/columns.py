"""The answers of a batch of which none is special: plain mappings of the same arrays, of the declared types,
as long as their requests. They are the outputs of the batch as they are, found a name at a time and not a
request at a time. Whatever else there is, ``OutputRules`` looks at each of them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, fits_shape
from gpuserve_worker.protocol.wire import WireRequest

_ARRAYS: Final = {np.ndarray}
_MAPPINGS: Final = {dict}


def alike_columns(
    answers: Sequence[Any],
    requests: Sequence[WireRequest],
    specs: Sequence[TensorSpec],
    dtypes: Mapping[str, np.dtype[Any]],
) -> list[tuple[TensorSpec, tuple[int, ...], list[Any]]] | None:
    """Each output of the batch with its shape and the array of every request; None where one of the answers
    is not like the others, or not as declared.
    """
    if set(map(type, answers)) != _MAPPINGS or len({one[2] for one in requests}) != 1:
        return None
    wanted = requests[0][2]
    rows = [one[0] for one in requests]
    columns = []
    for spec in specs:
        if wanted and spec.name not in wanted:
            continue
        column = _column(answers, spec, dtypes[spec.name], rows)
        if column is None:
            return None
        columns.append(column)
    if not wanted and set(map(len, answers)) != {len(specs)}:
        return None
    return columns


def _column(
    answers: Sequence[dict[str, Any]], spec: TensorSpec, dtype: np.dtype[Any], rows: Sequence[int]
) -> tuple[TensorSpec, tuple[int, ...], list[Any]] | None:
    name = spec.name
    arrays = [one.get(name) for one in answers]
    if spec.datatype == BYTES or set(map(type, arrays)) != _ARRAYS:
        return None
    shapes = [one.shape for one in arrays]  # type: ignore[union-attr]  # each is an array
    inner = shapes[0][1:]
    if shapes != [(count, *inner) for count in rows] or not fits_shape(inner, spec.shape):
        return None
    if {one.dtype for one in arrays} != {dtype}:  # type: ignore[union-attr]
        return None
    return spec, (sum(rows), *inner), arrays
