"""``group_by_keys`` and ``group_by_values``, which call a function once for each group of requests or rows;
``pad_batch`` and ``ConstantPadder``, which make batches and outputs as large as needed.

If all requests or rows are in one group, as is usual, nothing is split or joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gpuserve.decorators.batch_data import (
    Group,
    SomeRows,
    call_groups,
    check_rows,
    concatenated,
    data_of,
    each_changed,
    grouped,
    library_of,
    named,
    on_host,
    rows_of,
    select_requests,
    shape_of,
    split_arguments,
)
from gpuserve.decorators.results import call_in_sequence, map_result
from gpuserve.decorators.wrapping import (
    BatchError,
    F,
    StackError,
    ValuesError,
    check_below_batch,
    check_model_batches,
    check_names,
    checked_function,
    has_batch_axis,
    model_of,
    not_batching,
    served_model,
    wraps,
    wraps_request_list,
)
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.model_context import ModelContext
from gpuserve_worker.protocol.tensor import encode_bytes

PadFunction: TypeAlias = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def group_by_keys(decorated: F | None = None, /) -> F:
    """Call the function once for all requests that have the same inputs; above ``batch``.

    The responses are returned in the order of the requests. The groups run one after the other. If the
    function is a generator, each list that it yields becomes a list with None for the requests of other
    groups, which have no response this time.

    Raises:
        TypeError: The object is no function; when called: the argument is no list of requests.
        BatchError: (when called) A group has not one response for each of its requests.
    """
    function = checked_function(decorated, "@group_by_keys")

    @wraps_request_list(function)
    def call(*args: Any, **given: Any) -> Any:
        bound, requests = split_arguments(args, "@group_by_keys")
        if isinstance(requests, Batch):
            return function(*args, **given)  # a batch has one set of inputs
        groups = grouped(tuple(sorted(data_of(one))) for one in requests)
        if len(groups) < 2:
            return function(*args, **given)
        calls = [partial(function, *bound, select_requests(requests, group), **given) for group in groups]
        return call_groups(calls, groups, len(requests), "@group_by_keys")

    return call


def group_by_values(*keys: str, pad_fn: PadFunction | None = None) -> Callable[[F], F]:
    """Call the function once for all rows that have the same values in these inputs; below ``batch``.

    The groups run one after the other, in the order of their values, and the outputs are returned in the
    order of the rows. Groups whose outputs have different shapes need ``pad_fn``, which receives the outputs
    of all groups and makes their shapes equal, as ``ConstantPadder`` does. A missing optional input groups
    nothing. If the function is a generator, each of its outputs is for the rows of its group alone. The
    values of an input on a GPU are copied to the host to group the rows.

    Raises:
        TypeError: No names are given, or the object is no function.
        StackError: The decorator is above ``batch``.
        BatchError: (when called) The model does not batch, an input is missing, or the outputs do not fit
            their group or, without ``pad_fn``, each other.
    """
    check_names(keys, "@group_by_values")
    if pad_fn is not None and not callable(pad_fn):
        raise TypeError(f"pad_fn must be callable, as ConstantPadder(0) is, got {pad_fn!r:.100}")

    def decorate(decorated: F) -> F:
        function = checked_function(decorated, "@group_by_values")
        check_below_batch(function, "@group_by_values")

        @wraps(function)
        def call(*bound: Any, **inputs: Any) -> Any:
            check_model_batches("@group_by_values")
            present = [on_host(inputs[key]) for key in keys if _is_present(key, inputs)]
            groups = grouped(zip(*map(_labels, present), strict=True))
            groups.sort(key=lambda group: [_values(array[group[0]]) for array in present])
            if len(groups) < 2:
                return function(*bound, **inputs)
            rows = sum(map(len, groups))
            calls = [
                partial(function, *bound, **_with_rows(inputs, rows, partial(rows_of, positions=group)))
                for group in groups
            ]
            return call_in_sequence(
                calls,
                lambda answers: _joined(groups, answers, pad_fn),
                lambda position, answer: _part(groups[position], answer),
            )

        return call

    return decorate


def _is_present(key: str, inputs: Mapping[str, Any]) -> bool:
    if not inputs:
        raise StackError(
            "@group_by_values must be below @batch: it works on the arrays of a batch, but was called without"
        )
    if key in inputs:
        if getattr(inputs[key], "ndim", 0):
            return True
        raise BatchError(
            f"@group_by_values needs input {key!r} to have rows; put its @first_value below @group_by_values"
        )
    model = served_model()
    if model is not None and any(one.name == key and one.optional for one in model.inputs):
        return False
    raise BatchError(
        f"@group_by_values groups by the input {key!r}, but the inputs are {', '.join(map(repr, inputs))}"
    )


def _labels(array: Any) -> list[bytes]:
    """Return bytes for each row that are equal if the rows are, also for NaN, which does not equal itself."""
    if array.dtype.kind == "O":
        return [encode_bytes(np.ravel(row).tolist()) for row in array]
    return [row.tobytes() for row in array]


def _values(row: Any) -> list[Any]:
    return [one.encode() if isinstance(one, str) else one for one in np.ravel(row).tolist()]


def _with_rows(inputs: Mapping[str, Any], rows: int, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the inputs, those changed that have a batch axis of so many rows."""
    return {
        name: change(value) if has_batch_axis(name, value, rows) else value for name, value in inputs.items()
    }


def _part(group: Group, answer: Any) -> SomeRows:
    if isinstance(answer, SomeRows):  # from another @group_by_values below
        return SomeRows(answer.arrays, [group[position] for position in answer.positions])
    return SomeRows(_outputs(answer, len(group)), group)


def _outputs(answer: Any, rows: int) -> dict[str, Any]:
    model = served_model()
    outputs = named(answer, [one.name for one in model.outputs] if model is not None else ())
    check_rows(outputs, rows)
    return {name: np.asarray(one) if library_of(one) == "numpy" else one for name, one in outputs.items()}


def _joined(groups: Sequence[Group], answers: Sequence[Any], pad_fn: PadFunction | None) -> dict[str, Any]:
    outputs = [_outputs(answer, len(group)) for group, answer in zip(groups, answers, strict=True)]
    if pad_fn is not None:
        outputs = pad_fn(outputs)
    names = outputs[0].keys()
    if any(one.keys() != names for one in outputs):
        raise BatchError(
            "The function below @group_by_values answered two groups with different outputs: "
            f"{' and '.join(sorted({', '.join(map(repr, one)) for one in outputs}))}"
        )
    return {name: _column(name, groups, [one[name] for one in outputs]) for name in names}


def _column(name: str, groups: Sequence[Group], parts: Sequence[Any]) -> Any:
    inner = parts[0].shape[1:]
    if any(part.shape[1:] != inner for part in parts):
        shapes = " and ".join(sorted({str(part.shape[1:]) for part in parts}))
        raise BatchError(
            f"The rows of output {name!r} have the shapes {shapes} in the groups of @group_by_values: pass a "
            "pad_fn that makes them equal, as ConstantPadder(0)"
        )
    if any(library_of(part) != "numpy" for part in parts):
        where = [position for group in groups for position in group]
        places = sorted(range(len(where)), key=where.__getitem__)
        return concatenated(parts)[places]
    whole = np.empty((sum(map(len, groups)), *inner), np.result_type(*parts))
    for group, part in zip(groups, parts, strict=True):
        whole[group] = part
    return whole


def pad_batch(decorated: F | None = None, /) -> F:
    """Repeat the last row of every input up to the next preferred batch size; below ``batch``.

    If no preferred size is large enough, rows are repeated up to the largest batch. The outputs are cut back
    to the real rows.

    Raises:
        TypeError: The object is no function.
        StackError: The decorator is above ``batch``.
        BatchError: (when called) The model does not batch.
        NoModelError: (when called) The callable was not called by a server.
    """
    function = checked_function(decorated, "@pad_batch")
    check_below_batch(function, "@pad_batch")

    @wraps(function)
    def call(*bound: Any, **inputs: Any) -> Any:
        model = model_of("@pad_batch")
        rows = _row_count(inputs, model)
        sizes = (*sorted(model.preferred_batch_sizes), model.max_batch_size)
        size = next((size for size in sizes if size >= rows), rows)
        if size <= rows or rows == 0:
            return function(*bound, **inputs)
        positions = [*range(rows), *[rows - 1] * (size - rows)]
        padded = _with_rows(inputs, rows, partial(rows_of, positions=positions))
        return map_result(lambda answer: _cut(answer, rows, size), function(*bound, **padded))

    return call


class ConstantPadder:
    """A ``pad_fn`` that pads outputs of all groups to the largest size on each axis, strings with ""."""

    def __init__(self, pad_value: Any = 0) -> None:
        self.pad_value = pad_value

    def __call__(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the outputs, one mapping for each group, with equal shapes except for the first axis; raise
        ValuesError for other numbers of axes or dtypes. Outputs on a GPU are copied to the host.
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
        """Return the sizes behind the first axis, the dtype, and the padding value."""
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
        """Return the padding value: an empty string for strings, also in an array of objects."""
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


def _cut(answer: Any, rows: int, size: int) -> Any:
    """Return the answer for the real rows; outputs of another length stay unchanged."""
    if isinstance(answer, SomeRows):
        real = [place for place, position in enumerate(answer.positions) if position < rows]
        arrays = {name: value[real] for name, value in answer.arrays.items()}
        return SomeRows(arrays, [answer.positions[place] for place in real])
    return each_changed(answer, lambda value: value[:rows] if [*shape_of(value)][:1] == [size] else value)


def _either(values: set[Any]) -> str:
    return " and ".join(sorted(map(str, values)))
