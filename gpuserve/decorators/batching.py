"""``batch`` and ``sample``: from requests to arrays, and from arrays to responses. The worker gives both the
whole ``Batch``, whose arrays are views of the arena, and neither of them copies it. What they do for a plain
function is on the path of every request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, overload

import numpy as np

from gpuserve.decorators.errors import BatchError
from gpuserve.decorators.outputs import SomeRows, check_rows, named, per_request
from gpuserve.decorators.parameters import Asked, asked_parameters, by_parameters, without
from gpuserve.decorators.requests import is_request_list, joined, not_requests
from gpuserve.decorators.results import is_deferred, then
from gpuserve.decorators.wrapping import (
    BATCH,
    SAMPLE,
    F,
    checked_function,
    gives,
    is_misfit,
    misfit,
    wraps,
)
from gpuserve_worker.calling.request import Batch, BatchedOutputs, accept_batch

#: What most functions return, and nothing has to be awaited or iterated for.
_AT_HAND = frozenset({dict, list, tuple, np.ndarray})


@overload
def batch(decorated: F, /) -> F: ...
@overload
def batch(*, max_batch_size: int) -> Callable[[F], F]: ...
def batch(decorated: Any = None, /, *, max_batch_size: int | None = None) -> Any:
    """Call the function once for a whole batch, with one keyword argument for each input.

    Each argument is an array ``[rows, …]`` with the rows of every request, one after the other. The
    function returns its outputs, with the same number of rows: a mapping by output name, a list or
    tuple in the order of the declared outputs, or one array where the model has one output. It may be
    ``async``; a generator, async or not, yields outputs like these, each time for the whole batch.
    ``@batch(max_batch_size=64)`` says how many rows that are at most, where the model does not.
    Called by hand with arrays it is the function itself.

    Raises:
        TypeError: this is no function; when called, that it does not take the inputs.
        BatchError: (when called) the requests have different inputs, or the outputs do not fit the batch.
    """
    if max_batch_size is None:
        return _over_batches(checked_function(decorated, "@batch"))
    if not isinstance(max_batch_size, int) or max_batch_size < 1:
        raise TypeError(
            f"max_batch_size of @batch must be an integer of at least 1, got {max_batch_size!r:.99}"
        )

    def decorate(decorated: Any) -> Any:
        call = _over_batches(checked_function(decorated, "@batch"))
        call.max_batch_size = max_batch_size
        return call

    return decorate


def _over_batches(function: Any) -> Any:
    asked: dict[str, Asked] | None = None

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        nonlocal asked
        if not args:
            return _by_hand("@batch", function, args, given)
        *bound, requests = args
        is_batch = isinstance(requests, Batch)
        if not (is_batch or is_request_list(requests)):
            return _by_hand("@batch", function, args, given)
        if asked is None:
            asked = asked_parameters(function)
        if asked and not given.keys() >= asked.keys():
            return by_parameters(partial(call, *bound, **given), function, without(asked, given), requests)
        if not is_batch:
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
    gives(BATCH, call)
    return call


def sample(decorated: F | None = None, /) -> F:
    """Call the function with the arrays of one request, one keyword argument for each input.

    For models that do not batch. It returns, or yields, its outputs as under ``batch``, of any shape.
    Called by hand with arrays it is the function itself.

    Raises:
        TypeError: this is no function; when called, that it does not take the inputs.
        BatchError: (when called) there is more than one request, or its outputs are none.
    """
    function = checked_function(decorated, "@sample")
    asked: dict[str, Asked] | None = None

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        nonlocal asked
        if not args:
            return _by_hand("@sample", function, args, given)
        *bound, requests = args
        if not (isinstance(requests, Batch) or is_request_list(requests)):
            return _by_hand("@sample", function, args, given)
        if asked is None:
            asked = asked_parameters(function)
        if asked and not given.keys() >= asked.keys():
            return by_parameters(partial(call, *bound, **given), function, without(asked, given), requests)
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
    gives(SAMPLE, call)
    return call


def _by_hand(decorator: str, function: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """What the function gives for arrays, as its own types say. Raises TypeError: these are no arrays."""
    if not (args or given) or (args and isinstance(args[-1], list | tuple | Mapping)):
        raise not_requests(decorator, *args[-1:])
    return function(*args, **given)


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
