"""``pad_batch``, which fills a batch up to a size that the model prefers, and ``ConstantPadder``, which
makes the outputs of groups as large as each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuserve.decorators.array_libraries import concatenated, library_of, on_host, repeated
from gpuserve.decorators.errors import StackError, ValuesError
from gpuserve.decorators.outputs import SomeRows, each_changed
from gpuserve.decorators.results import then
from gpuserve.decorators.wrapping import (
    F,
    check_below_batch,
    checked_function,
    has_batch_axis,
    model_of,
    not_batching,
    wraps,
)
from gpuserve_worker.calling.context import ModelContext


def pad_batch(decorated: F | None = None, /) -> F:
    """Repeat the last row of every input up to the next preferred batch size; below ``batch``.

    Where no preferred size is large enough, up to the largest batch. The outputs are cut back to the
    rows that are real.

    Raises:
        TypeError: this is no function.
        StackError: it is above ``batch``.
        BatchError: (when called) the model does not batch.
        NoModelError: (when called) not by a server.
    """
    function = checked_function(decorated, "@pad_batch")
    check_below_batch(function, "@pad_batch")

    @wraps(function)
    def call(*bound: Any, **inputs: Any) -> Any:
        model = model_of("@pad_batch")
        rows = _row_count(inputs, model)
        size = _padded_size(rows, model)
        if size <= rows or rows == 0:
            return function(*bound, **inputs)
        padded = {
            name: _padded(value, size) if has_batch_axis(name, value, rows) else value
            for name, value in inputs.items()
        }
        return then(lambda answer: _cut(answer, rows, size), function(*bound, **padded))

    return call


class ConstantPadder:
    """Pads the outputs of all groups to the largest size on each axis; a ``pad_fn``.

    Byte strings and text are padded with empty ones, and as wide as the widest.
    """

    def __init__(self, pad_value: Any = 0) -> None:
        self.pad_value = pad_value

    def __call__(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The outputs, one mapping for each group, with equal shapes but for the first axis. Outputs on a GPU
        are brought to the host.

        Raises:
            ValuesError: an output differs in its number of axes, or in its dtype.
        """
        groups = [{name: on_host(value) for name, value in group.items()} for group in groups]
        names = {name for group in groups for name in group}
        targets = {
            name: self._target(name, [group[name] for group in groups if name in group]) for name in names
        }
        return [
            {name: self._padded(value, *targets[name]) for name, value in group.items()} for group in groups
        ]

    def _target(self, name: str, arrays: Sequence[Any]) -> tuple[tuple[int, ...], np.dtype[Any], Any]:
        """The sizes behind the first axis, the dtype, and what is put where there is nothing."""
        ranks = {one.ndim for one in arrays}
        if len(ranks) != 1:
            raise ValuesError(f"Output {name!r} cannot be padded: it has {_either(ranks)} axes in the groups")
        dtypes = {one.dtype for one in arrays}
        dtype = max(dtypes, key=lambda one: one.itemsize)
        if len(dtypes) != 1 and (dtype.kind not in "SU" or len({one.kind for one in dtypes}) != 1):
            raise ValuesError(f"Output {name!r} cannot be padded: it is {_either(dtypes)} in the groups")
        inner = tuple(max(sizes) for sizes in zip(*[one.shape[1:] for one in arrays], strict=True))
        return inner, dtype, self._pad_value(arrays, dtype)

    def _padded(self, array: Any, inner: tuple[int, ...], dtype: np.dtype[Any], pad_value: Any) -> Any:
        if array.shape[1:] == inner and array.dtype == dtype:
            return array
        whole = np.full((len(array), *inner), pad_value, dtype)
        whole[(slice(None), *map(slice, array.shape[1:]))] = array
        return whole

    def _pad_value(self, arrays: Sequence[Any], dtype: np.dtype[Any]) -> Any:
        """Strings are padded by empty ones. Of objects any group may tell what they are: one may be empty."""
        if dtype.kind in "SU":
            return dtype.type()
        elements = [array.flat[0] for array in arrays if array.size] if dtype.kind == "O" else []
        if elements and isinstance(elements[0], bytes | str):
            return type(elements[0])()
        return self.pad_value


def _row_count(inputs: Mapping[str, Any], model: ModelContext) -> int:
    if not inputs:
        raise StackError(
            "@pad_batch must be below @batch: it works on the arrays of a batch, but was called without"
        )
    if not model.batching:
        raise not_batching("@pad_batch")
    for spec in model.inputs:
        shape: tuple[int, ...] = getattr(inputs.get(spec.name), "shape", ())
        if len(shape) == len(spec.shape) + 1:
            return int(shape[0])
    return 0


def _padded_size(rows: int, model: ModelContext) -> int:
    sizes = (*sorted(model.preferred_batch_sizes), model.max_batch_size)
    return next((size for size in sizes if size >= rows), rows)


def _padded(array: Any, size: int) -> Any:
    if library_of(array) == "numpy":
        return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
    return concatenated([array, repeated(array[-1:], size - len(array))])


def _cut(answer: Any, rows: int, size: int) -> Any:
    """The answer for the rows that are real. Outputs of another length are no answer for the padded batch."""
    if isinstance(answer, SomeRows):
        real = [place for place, position in enumerate(answer.positions) if position < rows]
        arrays = {name: value[real] for name, value in answer.arrays.items()}
        return SomeRows(arrays, [answer.positions[place] for place in real])
    return each_changed(answer, lambda value: value[:rows] if _length(value) == size else value)


def _length(value: Any) -> int | None:
    shape: Sequence[int] = value.shape if hasattr(value, "shape") else np.shape(value)
    return int(shape[0]) if len(shape) else None


def _either(values: set[Any]) -> str:
    return " and ".join(sorted(map(str, values)))
