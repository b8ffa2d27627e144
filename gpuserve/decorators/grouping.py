"""``group_by_keys`` and ``group_by_values``: one call for each kind of request, or of row, in a batch. Where
all are of one kind, as they mostly are, nothing is cut and nothing is put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gpuserve.decorators.array_libraries import concatenated, library_of, on_host
from gpuserve.decorators.errors import BatchError, StackError
from gpuserve.decorators.outputs import SomeRows, check_rows, named, rows_of
from gpuserve.decorators.requests import Group, data_of, grouped, last_of, put_back, taken
from gpuserve.decorators.results import in_turn
from gpuserve.decorators.wrapping import (
    F,
    check_below_batch,
    check_model_batches,
    check_names,
    checked_function,
    has_batch_axis,
    model_or_none,
    wraps,
    wraps_request_list,
)
from gpuserve_worker.calling.request import Batch
from gpuserve_worker.protocol.tensor import encode_bytes

PadFunction: TypeAlias = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def group_by_keys(decorated: F | None = None, /) -> F:
    """Call the function once for all requests that have the same inputs; above ``batch``.

    The responses are put back in the order of the requests. The groups run one after the other. Where
    the function is a generator, each list that it yields is a list with None for the requests of other
    groups, which have no response this time.

    Raises:
        TypeError: this is no function; when called, that it is not given requests.
        BatchError: (when called) a group was not answered with a response for each of its requests.
    """
    function = checked_function(decorated, "@group_by_keys")

    @wraps_request_list(function)
    def call(*args: Any, **given: Any) -> Any:
        bound, requests = last_of(args, "@group_by_keys")
        if isinstance(requests, Batch):
            return function(*args, **given)  # a batch has one set of inputs
        groups = grouped(tuple(sorted(data_of(one))) for one in requests)
        if len(groups) < 2:
            return function(*args, **given)
        calls = [partial(function, *bound, taken(requests, group), **given) for group in groups]

        def spread(position: int, responses: Any) -> list[Any]:
            return put_back([groups[position]], [responses], len(requests), "@group_by_keys")

        return in_turn(
            calls, lambda answers: put_back(groups, answers, len(requests), "@group_by_keys"), spread
        )

    return call


def group_by_values(*keys: str, pad_fn: PadFunction | None = None) -> Callable[[F], F]:
    """Call the function once for all rows that have the same values in these inputs; below ``batch``.

    The groups run one after the other, in the order of their values, and the outputs are put back in
    the order of the rows. Groups whose outputs have different shapes need ``pad_fn``, which is given the
    outputs of all groups and makes their shapes equal, as ``ConstantPadder`` does. An optional input that
    is not there groups nothing. Where the function is a generator, each of its answers is one for the
    rows of its group alone. The values of an input on a GPU are brought to the host to group the rows by.

    Raises:
        TypeError: no names are given, or the decorated is no function.
        StackError: it is above ``batch``.
        BatchError: (when called) the model does not batch, an input is not there, or the outputs do not
            fit their group or, without ``pad_fn``, each other.
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
            groups = _groups_of_rows(inputs, keys)
            if len(groups) < 2:
                return function(*bound, **inputs)
            rows = sum(map(len, groups))
            calls = [partial(function, *bound, **_rows_of_inputs(inputs, group, rows)) for group in groups]
            return in_turn(
                calls,
                lambda answers: _joined(groups, answers, pad_fn),
                lambda position, answer: _part(groups[position], answer),
            )

        return call

    return decorate


def _groups_of_rows(inputs: Mapping[str, Any], keys: Sequence[str]) -> list[Group]:
    """The positions of rows with equal values, in the order of these values."""
    present = [on_host(inputs[key]) for key in keys if _is_present(key, inputs)]
    groups = grouped(zip(*map(_labels, present), strict=True))
    return sorted(groups, key=lambda group: [_values(array[group[0]]) for array in present])


def _is_present(key: str, inputs: Mapping[str, Any]) -> bool:
    """Whether there is an input to group by; one that requests may leave out need not be there. Raises
    StackError: there are no inputs at all; BatchError: the model has no such input, it has to be there, or it
    has no rows.
    """
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
    model = model_or_none()
    if model is not None and any(one.name == key and one.optional for one in model.inputs):
        return False
    raise BatchError(
        f"@group_by_values groups by the input {key!r}, but the inputs are {', '.join(map(repr, inputs))}"
    )


def _labels(array: Any) -> list[bytes]:
    """For each row bytes that are equal where the rows are: also for NaN, which does not equal itself."""
    if array.dtype.kind == "O":
        return [encode_bytes(np.ravel(row).tolist()) for row in array]
    return [row.tobytes() for row in array]


def _values(row: Any) -> list[Any]:
    return [one.encode() if isinstance(one, str) else one for one in np.ravel(row).tolist()]


def _rows_of_inputs(inputs: Mapping[str, Any], group: Group, rows: int) -> dict[str, Any]:
    return {
        name: rows_of(value, group) if has_batch_axis(name, value, rows) else value
        for name, value in inputs.items()
    }


def _part(group: Group, answer: Any) -> SomeRows:
    if isinstance(answer, SomeRows):  # of another @group_by_values below
        return SomeRows(answer.arrays, [group[position] for position in answer.positions])
    return SomeRows(_outputs(answer, len(group)), group)


def _outputs(answer: Any, rows: int) -> dict[str, Any]:
    model = model_or_none()
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
        return _column_elsewhere(groups, parts)
    whole = np.empty((sum(map(len, groups)), *inner), np.result_type(*parts))
    for group, part in zip(groups, parts, strict=True):
        whole[group] = part
    return whole


def _column_elsewhere(groups: Sequence[Group], parts: Sequence[Any]) -> Any:
    """The rows of all groups in the order of the batch, in the library that they are of."""
    where = [position for group in groups for position in group]
    places = sorted(range(len(where)), key=where.__getitem__)
    return concatenated(parts)[places]
