"""``first_value``, ``fill_optionals`` and ``model_context``, which change the arguments of the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from gpuserve.decorators.batch_data import (
    Data,
    as_inputs_of,
    changed,
    is_batching,
    is_request_list,
    library_of,
    on_host,
    row_count,
    shape_of,
    split_arguments,
)
from gpuserve.decorators.wrapping import (
    DefaultsError,
    F,
    InferenceCallable,
    ValuesError,
    check_below_batch,
    check_model_batches,
    check_names,
    checked_function,
    model_of,
    name_of,
    not_batching,
    wraps,
    wraps_request_list,
)
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.model_context import ModelContext
from gpuserve_worker.inference.ragged import RaggedTensor
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, datatype_of

_ARGUMENT: Final = "model_context"


def first_value(*names: str, squeeze_single_values: bool = True, strict: bool = True) -> Callable[[F], F]:
    """Pass the first row of these inputs instead of all rows: a value that all requests share.

    Below ``batch`` the arrays are changed; without ``batch``, the arrays of each request. A row of one
    element becomes a numpy scalar unless ``squeeze_single_values`` is False. Missing inputs are skipped. With
    ``strict`` all rows must be equal. To compare rows on a GPU, or to squeeze one, the values are copied to
    the host.

    Raises:
        TypeError: No names are given, or the object is no function.
        StackError: The decorator is above ``batch``.
        ValuesError: (when called) The rows differ, or an input has no rows.
        BatchError: (when called) The model does not batch.
    """
    check_names(names, "@first_value")

    def replaced(arrays: Data) -> dict[str, Any]:
        given = dict(arrays)
        for name in names:
            if name in given:
                given[name] = _first(name, given[name], squeeze=squeeze_single_values, strict=strict)
        return given

    def decorate(decorated: F) -> F:
        function = checked_function(decorated, "@first_value")
        check_below_batch(function, "@first_value")

        @wraps(function)
        def call(*args: Any, **arrays: Any) -> Any:
            if not args or not is_request_list(args[-1]):
                check_model_batches("@first_value")
                return function(*args, **replaced(arrays))
            *bound, requests = args
            if not is_batching(requests):
                raise not_batching("@first_value")
            return function(*bound, changed(requests, replaced), **arrays)

        return call

    return decorate


def fill_optionals(*misplaced: Any, **defaults: Any) -> Callable[[F], F]:
    """Give requests the default for each of these inputs that they lack; at the top, above ``batch``.

    A default is an array of the input's dtype and shape, without the batch axis; it is repeated for every row
    of a request.

    Raises:
        TypeError: No defaults are given, or the object is no function; when called: the argument is no list
            of requests.
        DefaultsError: A default is no array; when called: it does not fit the model's input.
        NoModelError: (when called) The callable was not called by a server.
    """
    if misplaced or not defaults:
        raise TypeError(
            "@fill_optionals is given defaults by the names of inputs, as @fill_optionals(name=array)"
        )
    for name, value in defaults.items():
        if not isinstance(value, np.ndarray | np.generic):
            raise DefaultsError(
                f"The default of input {name!r} of @fill_optionals must be a numpy array, but is an object "
                f"of type {type(value).__name__}"
            )

    def decorate(decorated: F) -> F:
        function = checked_function(decorated, "@fill_optionals")
        checked: ModelContext | None = None
        values: dict[str, Any] = {}

        @wraps_request_list(function)
        def call(*args: Any, **given: Any) -> Any:
            nonlocal checked, values
            bound, requests = split_arguments(args, "@fill_optionals")
            model = model_of("@fill_optionals")
            if model is not checked:  # usually only once: a model does not change while it is served
                values = _checked(defaults, model)
                checked = model
            return function(*bound, _filled(requests, values, model), **given)

        return call

    return decorate


def model_context(decorated: InferenceCallable | None = None, /) -> InferenceCallable:
    """Pass the function the keyword argument ``model_context``, a ``ModelContext``; anywhere in the stack.

    An argument that the caller passes, as in a test, takes precedence.

    Raises:
        TypeError: The object is no function, or does not take the argument.
        NoModelError: (when called) The callable was not called by a server.
    """
    function = checked_function(decorated, "@model_context")
    _check_parameter(function)

    @wraps_request_list(function)
    def call(*args: Any, **given: Any) -> Any:
        if _ARGUMENT not in given:
            given[_ARGUMENT] = model_of("@model_context")
        return function(*args, **given)

    return call


def _first(name: str, array: Any, *, squeeze: bool, strict: bool) -> Any:
    shape = shape_of(array)
    if not shape or shape[0] == 0:
        raise ValuesError(
            f"@first_value needs input {name!r} to have rows, but its shape is {shape}; "
            "use it with a model that batches"
        )
    if library_of(array) != "numpy" and (strict or squeeze):  # it stays there, unless it becomes a scalar
        first = _first(name, on_host(array if strict else array[:1]), squeeze=squeeze, strict=strict)
        return first if isinstance(first, np.generic) else array[0]
    first = array[0]
    if strict and not np.all(array == first):
        raise ValuesError(
            f"The values of input {name!r} are not equal over the batch; @first_value with strict=False "
            "uses the first row regardless"
        )
    return np.reshape(first, ())[()] if squeeze and np.size(first) == 1 else first


def _checked(defaults: Mapping[str, Any], model: ModelContext) -> dict[str, Any]:
    inputs = {spec.name: spec for spec in model.inputs}
    for name in defaults:
        if name not in inputs:
            raise DefaultsError(
                f"@fill_optionals has a default for the input {name!r}, which model {model.name!r} does not "
                f"have; its inputs are {', '.join(map(repr, inputs)) or 'none'}"
            )
    return {name: _fitting(inputs[name], np.asarray(value)) for name, value in defaults.items()}


def _fitting(spec: TensorSpec, value: Any) -> Any:
    text = f"The default of input {spec.name!r} of @fill_optionals"
    try:
        datatype = BYTES if value.dtype.kind == "U" else datatype_of(value.dtype)
    except ValueError as error:
        raise DefaultsError(f"{text}: {error}") from None
    if datatype != spec.datatype:
        raise DefaultsError(f"{text} must be {spec.datatype}, as the model declares, but is {datatype}")
    fits = len(value.shape) == len(spec.shape) and all(
        declared in (-1, dim) for declared, dim in zip(spec.shape, value.shape, strict=True)
    )
    if not fits:
        raise DefaultsError(
            f"{text} must have the shape {spec.shape}, without a batch axis, but has {value.shape}"
        )
    if value.dtype.kind == "U":
        value = np.char.encode(value, "utf-8")
    return value.astype(object) if datatype == BYTES else value


def _filled(requests: Any, values: Mapping[str, Any], model: ModelContext) -> Any:
    batching = model.batching
    if isinstance(requests, Batch):
        missing = [name for name in values if name not in requests.arrays]
        if not missing:
            return requests
        arrays = _with(requests.arrays, values, missing, sum(requests.rows) if batching else None, model)
        for name in missing:
            if name in requests.ragged.inputs:
                shapes = [(count, *arrays[name].shape[1:]) for count in requests.rows]
                flat = arrays[name].reshape(-1)
                arrays[name] = RaggedTensor(flat, shapes, requests.ragged.inputs[name])
        return requests.with_arrays(arrays)

    def fill(data: Data) -> dict[str, Any]:
        missing = [name for name in values if name not in data]
        return _with(data, values, missing, row_count(data) if batching else None, model)

    return changed(requests, fill)


def _with(
    data: Data, values: Mapping[str, Any], missing: list[str], rows: int | None, model: ModelContext
) -> dict[str, Any]:
    """Return the data with the missing inputs, each a new array: functions may write to their inputs."""
    filled = dict(data)
    for name in missing:
        value = values[name]
        filled[name] = value.copy() if rows is None else np.repeat(value[np.newaxis], rows, axis=0)
    if model.array != "numpy":
        specs = {spec.name: spec for spec in model.inputs}
        filled |= {name: as_inputs_of(model, specs[name], filled[name]) for name in missing}
    return filled


def _check_parameter(function: InferenceCallable) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C without a signature
        return
    if _ARGUMENT in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    taken = f"{name_of(function)}({', '.join(parameters)})"
    raise TypeError(f"@model_context passes the keyword argument {_ARGUMENT}, which {taken} does not take")
