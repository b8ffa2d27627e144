"""``batch`` and ``sample``: from requests to arrays, and from arrays to responses. The worker gives both the
whole ``Batch``, whose arrays are views of the arena, and neither of them copies it. What they do for a plain
function is on the path of every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuserve.decorators.errors import BatchError
from gpuserve.decorators.outputs import SomeRows, check_rows, named, per_request
from gpuserve.decorators.requests import joined, not_requests
from gpuserve.decorators.results import is_deferred, then
from gpuserve.decorators.wrapping import InferenceCallable, checked_function, is_misfit, misfit, wraps
from gpuserve_worker.calling.request import Batch, BatchedOutputs, accept_batch

#: What most functions return, and nothing has to be awaited or iterated for.
_AT_HAND = frozenset({dict, list, tuple, np.ndarray})


def batch(decorated: InferenceCallable | None = None, /) -> InferenceCallable:
    """Call the function once for a whole batch, with one keyword argument for each input.

    Each argument is an array ``[rows, …]`` with the rows of every request, one after the other. The
    function returns its outputs, with the same number of rows: a mapping by output name, a list or
    tuple in the order of the declared outputs, or one array where the model has one output. It may be
    ``async``; a generator, async or not, yields outputs like these, each time for the whole batch.

    Raises:
        TypeError: this is no function; when called, that it does not take the inputs.
        BatchError: (when called) the requests have different inputs, or the outputs do not fit the batch.
    """
    function = checked_function(decorated, "@batch")

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        if not args:
            raise not_requests("@batch")
        *bound, requests = args
        if not isinstance(requests, Batch):
            requests = joined(requests, "@batch")
        try:
            result = function(*bound, **given, **requests.arrays)
        except TypeError as error:
            if is_misfit(error):
                raise misfit(error, function, requests.arrays) from None
            raise
        rows, names, batching = requests.rows, requests.output_names, requests.batching
        if type(result) not in _AT_HAND and is_deferred(result):
            del requests  # what follows may live as long as a stream
            return then(lambda answer: _batched(answer, rows, names, batching), result)
        return _batched(result, rows, names, batching)

    accept_batch(call)
    return call


def sample(decorated: InferenceCallable | None = None, /) -> InferenceCallable:
    """Call the function with the arrays of one request, one keyword argument for each input.

    For models that do not batch. It returns, or yields, its outputs as under ``batch``, of any shape.

    Raises:
        TypeError: this is no function; when called, that it does not take the inputs.
        BatchError: (when called) there is more than one request, or its outputs are none.
    """
    function = checked_function(decorated, "@sample")

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        if not args:
            raise not_requests("@sample")
        *bound, requests = args
        alone = _only(requests)
        try:
            result = function(*bound, **given, **alone.arrays)
        except TypeError as error:
            if is_misfit(error):
                raise misfit(error, function, alone.arrays) from None
            raise
        names = alone.output_names
        return then(lambda answer: [named(answer, names)], result)

    accept_batch(call)
    return call


def _batched(result: Any, rows: tuple[int, ...], names: Sequence[str], batching: bool) -> Any:
    if type(result) is SomeRows:
        return per_request(result, rows)
    outputs = named(result, names)
    if not batching:
        return [outputs]
    check_rows(outputs, sum(rows))
    return BatchedOutputs(outputs, rows)


def _only(requests: Any) -> Batch:
    count = len(requests.requests) if isinstance(requests, Batch) else None
    if count is None and isinstance(requests, list | tuple):
        count = len(requests)
    if count is not None and count != 1:
        raise BatchError(
            f"@sample takes one request at a time, but the batch holds {count}; "
            "use it with a model that does not batch"
        )
    return requests if isinstance(requests, Batch) else joined(requests, "@sample")
