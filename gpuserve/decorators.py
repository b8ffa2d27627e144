"""Decorators that turn an inference callable over requests into one over arrays.

They are imported by user code inside workers, so nothing here may import more than numpy and
``gpuserve_worker``. Each of them works on functions and on methods, and may be put over a callable that
is called by hand with a list of ``Request`` or of plain dicts, as tests do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpuserve_worker.request import Batch, BatchedOutputs, Request, RequestBatch, accept_batch

__all__ = ["batch", "first_value", "sample"]

InferenceCallable: TypeAlias = Callable[..., Any]


def batch(function: InferenceCallable) -> InferenceCallable:
    """Call ``function`` once for a whole batch, with one keyword argument for each input.

    Each argument is an array ``[rows, …]`` with the rows of every request, one after the other. The
    function returns its outputs, with the same number of rows: a mapping by output name, a list or
    tuple in the order of the declared outputs, or one array where the model has one output.

    Raises (when called):
        ValueError: the requests have different inputs, or the outputs do not fit the batch.
    """

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        *bound, requests = args
        if isinstance(requests, Batch):
            arrays, rows = requests.arrays, requests.rows
        else:
            arrays, rows = _concatenated(requests)
        outputs = _named(function(*bound, **given, **arrays), getattr(requests, "output_names", None))
        if not getattr(requests, "batching", True):
            return [outputs]
        _check_rows(outputs, sum(rows))
        return BatchedOutputs(outputs, rows)

    accept_batch(call)
    return call


def sample(function: InferenceCallable) -> InferenceCallable:
    """Call ``function`` with the arrays of one request, one keyword argument for each input.

    For models that do not batch. It returns its outputs as under ``batch``, of any shape.

    Raises (when called):
        ValueError: there is more than one request.
    """

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        *bound, requests = args
        items = requests.requests if isinstance(requests, Batch) else requests
        if len(items) != 1:
            raise ValueError(
                f"@sample takes one request at a time, but the batch holds {len(items)}; "
                "use it with a model that does not batch"
            )
        arrays = requests.arrays if isinstance(requests, Batch) else _data(requests[0])
        return [_named(function(*bound, **given, **arrays), getattr(requests, "output_names", None))]

    accept_batch(call)
    return call


def first_value(
    *names: str, squeeze_single_values: bool = True, strict: bool = True
) -> Callable[[InferenceCallable], InferenceCallable]:
    """Give the first row of these inputs instead of all of them; a value that all requests share.

    Under ``batch`` it changes the arrays, over a list of requests each request's own. A row of one
    element becomes a numpy scalar unless ``squeeze_single_values`` is False. Inputs that a request
    lacks are skipped. With ``strict`` all rows must be equal.

    Raises (when called):
        ValueError: the rows differ, or an input has no rows.
    """

    def replaced(arrays: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(arrays)
        for name in names:
            if name in given:
                given[name] = _first(name, given[name], squeeze=squeeze_single_values, strict=strict)
        return given

    def decorate(function: InferenceCallable) -> InferenceCallable:
        @functools.wraps(function)
        def call(*args: Any, **arrays: Any) -> Any:
            if arrays or not args:
                return function(*args, **replaced(arrays))
            *bound, requests = args
            return function(*bound, _with_data(requests, replaced))

        return call

    return decorate


def _concatenated(requests: Sequence[Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The arrays of the whole batch, and the rows of each request."""
    data = [_data(one) for one in requests]
    if not data:
        return {}, ()
    names = data[0].keys()
    if any(one.keys() != names for one in data):
        raise ValueError("Cannot batch requests with different sets of inputs")
    first = next(iter(data[0].values()), None)
    if len(data) == 1:
        return dict(data[0]), (first.shape[0] if first is not None and first.ndim else 1,)
    rows = tuple(len(next(iter(one.values()))) if one else 1 for one in data)
    return {name: np.concatenate([one[name] for one in data]) for name in names}, rows


def _data(request: Any) -> Any:
    return request.data if isinstance(request, Request) else request


def _named(result: Any, output_names: Sequence[str] | None) -> dict[str, Any]:
    """Outputs by name. Where the declared names are not known, OUTPUT_1…: they map by position later."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, (list, tuple)):
        values = list(result)
    elif hasattr(result, "__array__"):
        values = [result]
    else:
        raise ValueError(
            f"Unsupported output type {type(result).__name__}: expected a mapping of output names to arrays, "
            "a list of arrays in the order of the declared outputs, or one array"
        )
    names = output_names or [f"OUTPUT_{position}" for position in range(1, len(values) + 1)]
    if len(values) != len(names):
        raise ValueError(
            f"The inference callable returned {len(values)} outputs, but the model declares {len(names)}: "
            f"{', '.join(names)}"
        )
    return dict(zip(names, values, strict=True))


def _check_rows(outputs: Mapping[str, Any], rows: int) -> None:
    for name, value in outputs.items():
        shape = value.shape if hasattr(value, "shape") else np.shape(value)
        if not shape or shape[0] != rows:
            raise ValueError(
                f"Received output {name!r} of shape {tuple(shape)}, but the batch has {rows} "
                f"{'row' if rows == 1 else 'rows'}: the first axis of every output must be as long"
            )


def _first(name: str, array: Any, *, squeeze: bool, strict: bool) -> Any:
    if array.ndim == 0 or len(array) == 0:
        raise ValueError(
            f"@first_value needs input {name!r} to have rows, but its shape is {array.shape}; "
            "use it with a model that batches"
        )
    first = array[0]
    if strict and not np.all(array == first):
        raise ValueError(
            f"The values of input {name!r} are not equal over the batch; @first_value with strict=False "
            "takes the first one all the same"
        )
    return np.reshape(first, ())[()] if squeeze and np.size(first) == 1 else first


def _with_data(requests: Sequence[Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """The same requests with other data; what the worker's list knows besides stays known."""
    changed: list[Any] = [
        Request(change(one.data), one.parameters, one.requested_output_names)
        if isinstance(one, Request)
        else change(one)
        for one in requests
    ]
    if isinstance(requests, RequestBatch):
        return RequestBatch(changed, requests.output_names, requests.batching)
    return changed
