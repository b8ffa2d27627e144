"""``batch``, ``sample`` and ``Parameter``: from requests to arrays and parameters, and from arrays to
responses.

The worker passes the whole ``Batch``, whose arrays are views of the arena; no array is copied. The code for a
plain function is on the path of every request. Requests of one batch with different parameter values are
different calls. Annotations are read at the first call, when all their names exist.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np

from gpuserve.core.suggestions import explained
from gpuserve.decorators.batch_data import (
    SomeRows,
    call_groups,
    check_rows,
    grouped,
    is_request_list,
    join_requests,
    named,
    not_requests,
    per_request,
    select_requests,
)
from gpuserve.decorators.coded import Coding, coding_of
from gpuserve.decorators.ragged import (
    NO_LENGTHS,
    Lengths,
    Padding,
    arguments,
    cut_outputs,
    join_ragged,
    refusals,
)
from gpuserve.decorators.results import is_deferred, map_result
from gpuserve.decorators.wrapping import (
    BATCH,
    SAMPLE,
    BatchError,
    F,
    RequestError,
    checked_function,
    hints_of,
    is_misfit,
    misfit,
    wraps,
)
from gpuserve_worker.inference.callable_loading import CallableKind, kind_of
from gpuserve_worker.inference.inference_request import (
    Batch,
    BatchedOutputs,
    Request,
    accept_batch,
    mark_argument_form,
)
from gpuserve_worker.inference.ragged import Axes

T = TypeVar("T")


class _Mark(enum.Enum):
    """The mark of a function parameter whose value comes from the request."""

    OF_REQUEST = "a parameter of the request"


#: ``top: Parameter[int] = 5``: a request parameter besides the tensors, an int, float, bool or str; None if a
#: request does not have it.
Parameter: TypeAlias = Annotated[T, _Mark.OF_REQUEST]

#: The allowed types of a value for each kind, and their name in messages.
_KINDS: Final[dict[type, tuple[tuple[type, ...], str]]] = {
    bool: ((bool,), "a bool"),
    int: ((int,), "an int"),
    float: ((float, int), "a float"),
    str: ((str,), "a str"),
}
_SHOWN: Final = 64


class ParameterError(RequestError):
    """A request with a wrong or missing value for a parameter of the function."""


class RequestedParameter(NamedTuple):
    """A request parameter of the function; ``default`` is ``inspect.Parameter.empty`` if it has none."""

    name: str
    kind: type
    default: Any

    def value(self, parameters: Mapping[str, Any]) -> Any:
        """Return the parameter's value in a request; raise ParameterError if it is wrong or missing."""
        types_, word = _KINDS[self.kind]
        if self.name not in parameters:
            if self.default is inspect.Parameter.empty:
                raise ParameterError(f"parameter {self.name!r} of the request is missing: expected {word}")
            return self.default
        value = parameters[self.name]
        if not isinstance(value, types_) or (isinstance(value, bool) and self.kind is not bool):
            given = f"{type(value).__name__} {repr(value)[:_SHOWN]}"
            raise ParameterError(f"parameter {self.name!r} of the request must be {word}, given the {given}")
        return self.kind(value)


def is_parameter_type(hint: Any) -> bool:
    return _Mark.OF_REQUEST in getattr(hint, "__metadata__", ())


def requested_parameters(function: Any) -> dict[str, RequestedParameter]:
    """Return the function's request parameters by name; raise TypeError if no request can carry one."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C without a signature
        return {}
    hints = hints_of(function)
    return {
        name: RequestedParameter(name, parameter_kind(name, hints[name]), parameters[name].default)
        for name in parameters
        if is_parameter_type(hints.get(name))
    }


def without(
    asked: Mapping[str, RequestedParameter], given: Mapping[str, Any]
) -> dict[str, RequestedParameter]:
    return {name: one for name, one in asked.items() if name not in given}


def parameter_kind(name: str, hint: Any) -> type:
    """Return the type of a ``Parameter``; raise TypeError if no request can carry the type."""
    inner = hint.__origin__
    if typing.get_origin(inner) in {typing.Union, types.UnionType}:
        (inner,) = [one for one in typing.get_args(inner) if one is not type(None)] or [None]
    if inner not in _KINDS:
        raise TypeError(f"Parameter {name!r} must be an int, float, bool or str, but its type is {inner!r}")
    kind: type = inner
    return kind


def by_parameters(
    call: Callable[..., Any], function: Any, asked: Mapping[str, RequestedParameter], requests: Any
) -> Any:
    """Return the responses of ``call``, which is called once for all requests with equal parameter values.

    A request with a wrong value gets the error as its response.
    """
    if isinstance(requests, Batch):
        given = [one[1] for one in requests.requests]
    else:
        given = [getattr(one, "parameters", {}) for one in requests]
    labels: list[Any] = []
    for parameters in given:
        try:
            labels.append(tuple(one.value(parameters) for one in asked.values()))
        except ParameterError as error:
            labels.append(error)

    def call_with(values: tuple[Any, ...], of_values: Any) -> Any:
        return call(of_values, **dict(zip(asked, values, strict=True)))

    return by_labels(call_with, function, labels, requests)


def by_labels(call: Callable[[Any, Any], Any], function: Any, labels: Sequence[Any], requests: Any) -> Any:
    """Return the responses of ``call(label, requests)``, once a label; errors as labels are responses."""
    groups = grouped(labels)
    if len(groups) == 1 and not isinstance(labels[0], RequestError):
        return call(labels[0], requests)
    listed = requests.as_list() if isinstance(requests, Batch) else requests
    calls: list[Callable[[], Any]] = []
    for group in groups:
        label, chosen = labels[group[0]], select_requests(listed, group)
        if isinstance(label, RequestError):
            calls.append(partial(_refusal, kind_of(function), [label] * len(group)))
        else:
            calls.append(partial(call, label, chosen))
    return call_groups(calls, groups, len(listed), "@batch")


def _refusal(kind: CallableKind, answer: list[RequestError]) -> Any:
    """Return an answer in the form of results of this kind of function."""

    async def coroutine() -> Any:
        return answer

    async def generator() -> AsyncIterator[Any]:
        yield answer

    match kind:
        case CallableKind.COROUTINE:
            return coroutine()
        case CallableKind.GENERATOR:
            return iter([answer])
        case CallableKind.ASYNC_GENERATOR:
            return generator()
        case _:
            return answer


#: The usual types of outputs, which need not be awaited or iterated.
_AT_HAND = frozenset({dict, list, tuple, np.ndarray})


@overload
def batch(decorated: F, /) -> F: ...
@overload
def batch(
    *,
    max_batch_size: int | None = ...,
    pad: Any = ...,
    lengths: str | Mapping[str, str] | None = ...,
    side: Literal["right", "left"] = ...,
    pad_to_multiple_of: int = ...,
    max_length: int | None = ...,
    dtype: Any = ...,
) -> Callable[[F], F]: ...
@explained
def batch(
    decorated: Any = None,
    /,
    *,
    max_batch_size: int | None = None,
    pad: Any = None,
    lengths: str | Mapping[str, str] | None = None,
    side: str = "right",
    pad_to_multiple_of: int = 1,
    max_length: int | None = None,
    dtype: Any = None,
) -> Any:
    """Call the function once for a whole batch, with one keyword argument for each input.

    Each argument is an array ``[rows, …]`` with the rows of all requests, one after the other. The function
    returns its outputs, with the same number of rows: a mapping by output name, a list or tuple in the order
    of the declared outputs, or one array if the model has one output. The function may be ``async``; a
    generator, async or not, yields such outputs, each time for the whole batch. ``@batch(max_batch_size=64)``
    sets the largest number of rows if the model does not. A direct call with arrays calls the function
    itself.

    An input that is declared ``ragged`` is a list with one array for each row. With ``pad`` it is one array,
    padded on its variable axes to the longest row. An output that is declared ``ragged`` is a list with one
    array for each row, or an array of the padded sizes, which is cut to the lengths of the input.

    Args:
        max_batch_size: Largest number of rows of a batch.
        pad: The value of added elements. None: ragged inputs are lists.
        lengths: The name of a further argument: the lengths of the first ragged input, int64 ``[rows]``, or
            ``[rows, axes]`` if several of its axes are variable. Or such names by input.
        side: The side of the added elements.
        pad_to_multiple_of: A number that divides every padded size.
        max_length: Largest size of a variable axis; a request with more gets INVALID_ARGUMENT.
        dtype: The dtype of padded inputs, by default that of the input.

    Raises:
        TypeError: The object is no function; when called: the function does not take the inputs.
        BatchError: (when called) The requests have different inputs, or the outputs do not fit the batch.
    """
    if decorated is not None:
        return _over_batches(checked_function(decorated, "@batch"), None)
    padding = None if pad is None else Padding(pad, lengths, side, pad_to_multiple_of, max_length, dtype)
    if padding is not None:
        padding.check()
    elif (lengths, side, pad_to_multiple_of, max_length, dtype) != (None, "right", 1, None, None):
        raise TypeError(
            "lengths, side, pad_to_multiple_of, max_length and dtype of @batch have no effect without pad"
        )
    elif max_batch_size is None:
        checked_function(None, "@batch")  # raises
    if max_batch_size is not None and (not isinstance(max_batch_size, int) or max_batch_size < 1):
        raise TypeError(
            f"max_batch_size of @batch must be an integer of at least 1, got {max_batch_size!r:.99}"
        )

    def decorate(decorated: Any) -> Any:
        call = _over_batches(checked_function(decorated, "@batch"), padding)
        if lengths is not None:
            call.lengths_arguments = tuple(lengths.values()) if isinstance(lengths, Mapping) else (lengths,)
        if max_batch_size is not None:
            call.max_batch_size = max_batch_size
        return call

    return decorate


def _over_batches(function: Any, padding: Padding | None) -> Any:
    asked: dict[str, RequestedParameter] | None = None
    coding: Coding | None = None

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        nonlocal asked, coding
        if not args:
            return _by_hand("@batch", function, args, given)
        *bound, requests = args
        is_batch = isinstance(requests, Batch)
        if not (is_batch or is_request_list(requests)):
            return _by_hand("@batch", function, args, given)
        if asked is None:
            asked, coding = requested_parameters(function), coding_of(function)
        if asked and not given.keys() >= asked.keys():
            return by_parameters(partial(call, *bound, **given), function, without(asked, given), requests)
        if not is_batch:
            requests = join_ragged(requests, padding)
        ragged = requests.ragged
        if labels := ragged.inputs and refusals(requests, padding):
            return by_labels(lambda _, others: call(*bound, others, **given), function, labels, requests)
        arrays, lengths = arguments(requests, padding) if ragged.inputs else (requests.arrays, NO_LENGTHS)
        if coding is not None:
            objects, errors = coding.decode_batch(requests)
            if any(errors):
                return by_labels(lambda _, others: call(*bound, others, **given), function, errors, requests)
            arrays = {**arrays, **objects}
        result = _called(function, bound, given, arrays)
        rows, names, batching = requests.rows, requests.output_names, requests.batching
        if type(result) not in _AT_HAND and is_deferred(result):
            del requests, arrays  # the result may live as long as a stream
            return map_result(
                lambda answer: _batched(answer, rows, names, batching, ragged.outputs, lengths, coding),
                result,
            )
        return _batched(result, rows, names, batching, ragged.outputs, lengths, coding)

    accept_batch(call)
    mark_argument_form(BATCH, call)
    return call


def sample(decorated: F | None = None, /) -> F:
    """Call the function with the arrays of one request, one keyword argument for each input.

    For models that do not batch. The function returns or yields its outputs as under ``batch``, of any shape.
    Over ``admit`` of a stepped callable, the function returns the state of the request.
    A direct call with arrays calls the function itself.

    Raises:
        TypeError: The object is no function; when called: the function does not take the inputs.
        BatchError: (when called) There is more than one request, or the result is no outputs.
    """
    function = checked_function(decorated, "@sample")
    asked: dict[str, RequestedParameter] | None = None
    coding: Coding | None = None

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        nonlocal asked, coding
        if not args:
            return _by_hand("@sample", function, args, given)
        *bound, requests = args
        is_alone = isinstance(requests, Request)
        if not (is_alone or isinstance(requests, Batch) or is_request_list(requests)):
            return _by_hand("@sample", function, args, given)
        if asked is None:
            asked, coding = requested_parameters(function), coding_of(function)
        if is_alone:
            values = {name: one.value(requests.parameters) for name, one in without(asked, given).items()}
            data = requests.data if coding is None else requests.data | coding.decode_sample(requests.data)
            return _called(function, bound, given | values, data)
        if asked and not given.keys() >= asked.keys():
            return by_parameters(partial(call, *bound, **given), function, without(asked, given), requests)
        count = len(requests.requests if isinstance(requests, Batch) else requests)
        if count != 1:
            raise BatchError(
                f"@sample takes one request at a time, but the batch holds {count}; "
                "use it with a model that does not batch"
            )
        alone = requests if isinstance(requests, Batch) else join_requests(requests, "@sample")
        names, own = alone.output_names, coding
        if own is None:
            result = _called(function, bound, given, alone.arrays)
            return map_result(lambda answer: [named(answer, names)], result)
        result = _called(function, bound, given, {**alone.arrays, **own.decode_sample(alone.arrays)})

        def encoded(answer: Any) -> Any:
            return [named(own.encode(answer, lambda given: named(given, names), batched=False), names)]

        return map_result(encoded, result)

    accept_batch(call)
    mark_argument_form(SAMPLE, call)
    return call


def _called(function: Any, bound: Sequence[Any], given: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    try:
        return function(*bound, **given, **arrays)
    except TypeError as error:
        if is_misfit(error):
            raise misfit(error, function, arrays) from None
        raise


def _by_hand(decorator: str, function: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Call the function directly with arrays; raise TypeError if the arguments are no arrays."""
    if not (args or given) or (args and isinstance(args[-1], list | tuple | Mapping)):
        raise not_requests(decorator, *args[-1:])
    return function(*args, **given)


def _batched(
    result: Any,
    rows: tuple[int, ...],
    names: Sequence[str],
    batching: bool,
    ragged: Mapping[str, Axes],
    lengths: Sequence[Lengths],
    coding: Coding | None,
) -> Any:
    if type(result) is SomeRows:
        return per_request(result, rows)
    if coding is not None:
        result = coding.encode(result, lambda given: named(given, names), batched=True)
    outputs = named(result, names)
    if not batching:
        return [outputs]
    if ragged:
        return cut_outputs(outputs, rows, ragged, lengths)
    check_rows(outputs, sum(rows))
    return BatchedOutputs(outputs, rows)
