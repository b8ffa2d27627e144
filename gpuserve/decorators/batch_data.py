"""Requests and outputs as arrays: joining and splitting requests, and arrays of numpy, cupy and torch.

A request is a ``Request`` or, if a callable is called directly, any mapping of input names to arrays. Values
on a device are copied to the host only if a decorator has to read them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from gpuserve.decorators.results import call_in_sequence
from gpuserve.decorators.wrapping import BatchError
from gpuserve_worker.inference.inference_request import Batch, Request, RequestBatch
from gpuserve_worker.inference.model_context import ModelContext
from gpuserve_worker.inference.outputs import OutputError, named_outputs
from gpuserve_worker.protocol.payloads import WireRequest
from gpuserve_worker.protocol.tensor import TensorSpec, as_tensor

_CUPY: Final = "cupy"
_TORCH: Final = "torch"


def library_of(array: Any) -> str:
    """Return the name of an array's library; "numpy" for other objects."""
    if isinstance(array, np.ndarray | np.generic):
        return "numpy"
    # The bases count too: torchvision and users have subclasses of torch.Tensor.
    names = (one.__module__.partition(".")[0] for one in type(array).__mro__)
    return next((name for name in names if name in {_CUPY, _TORCH}), "numpy")


def on_host(array: Any) -> Any:
    """Return the values as a numpy array; wait for the device if they are on one."""
    library = library_of(array)
    if library == _CUPY:
        return array.get()
    if library == _TORCH:
        tensor = array.detach().resolve_neg().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return array


def concatenated(arrays: Sequence[Any]) -> Any:
    """Return one array of the same library with all rows; raise ValueError if the arrays do not fit."""
    libraries = {library_of(one) for one in arrays}
    if libraries == {"numpy"}:
        return np.concatenate(arrays)
    if len(libraries) > 1:
        raise ValueError(f"arrays of {' and '.join(sorted(libraries))} cannot be joined")
    (name,) = libraries
    library = sys.modules[name]
    try:
        return library.cat(list(arrays)) if name == _TORCH else library.concatenate(list(arrays))
    except RuntimeError as error:  # torch raises RuntimeError for shapes that do not fit
        raise ValueError(str(error)) from None


def as_inputs_of(model: ModelContext, spec: TensorSpec, value: Any) -> Any:
    """Return a numpy array in the library and on the device of an input of the model; raise BatchError."""
    if value.dtype.kind == "O" or model.array == "numpy":
        return value
    there = spec.memory == "gpu" and model.device != "cpu"
    try:
        if model.array == _TORCH:
            return as_tensor(value).cuda() if there else as_tensor(value)
        return sys.modules[_CUPY].asarray(value) if there else value
    except (TypeError, ValueError) as error:
        raise BatchError(f"The default of input {spec.name!r} cannot be given on the GPU: {error}") from None


Data: TypeAlias = Mapping[str, Any]
#: Positions of requests or rows of one group.
Group: TypeAlias = list[int]


def split_arguments(args: tuple[Any, ...], decorator: str) -> tuple[tuple[Any, ...], Any]:
    """Return the positional arguments before the requests, and the requests; raise TypeError without any."""
    if args and is_request_list(args[-1]):
        return args[:-1], args[-1]
    raise not_requests(decorator, *args[-1:])


def not_requests(decorator: str, *given: Any) -> TypeError:
    what = f"an object of type {type(given[0]).__name__}" if given else "no positional argument"
    return TypeError(
        f"{decorator} expected a list of requests, each a mapping of input names to arrays, but was given "
        f"{what}; functions below @batch and @sample are given arrays"
    )


def is_request_list(value: Any) -> bool:
    if isinstance(value, Batch | RequestBatch):
        return True
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)


def is_batching(requests: Any) -> bool:
    return bool(getattr(requests, "batching", True))


def join_requests(requests: Any, decorator: str) -> Batch:
    """Return the requests as one batch; raise TypeError, or BatchError if they do not go together."""
    if not is_request_list(requests):
        raise not_requests(decorator, requests)
    data = [data_of(one) for one in requests]
    rows = [row_count(one) for one in data]
    arrays = join_data(data)
    output_names = getattr(requests, "output_names", ())
    return Batch(arrays, [WireRequest(count, {}, ()) for count in rows], output_names, is_batching(requests))


def data_of(request: Any) -> Data:
    data: Data = request.data if isinstance(request, Request) else request
    return data


def changed(requests: Any, change: Callable[[Data], dict[str, Any]]) -> Any:
    """Return the same requests with other data, and with all other attributes unchanged."""
    made = [one.with_data(change(one.data)) if isinstance(one, Request) else change(one) for one in requests]
    return _like(requests, made)


def select_requests(requests: Sequence[Any], positions: Sequence[int]) -> Any:
    return _like(requests, [requests[position] for position in positions])


def grouped(labels: Iterable[Hashable]) -> list[Group]:
    """Return the positions of equal labels, in the order of the first occurrence."""
    groups: dict[Hashable, Group] = {}
    for position, label in enumerate(labels):
        groups.setdefault(label, []).append(position)
    return list(groups.values())


def call_groups(
    calls: Sequence[Callable[[], Any]], groups: Sequence[Group], count: int, decorator: str
) -> Any:
    """Return the responses of the calls, one for each group, in the order of the requests."""
    return call_in_sequence(
        calls,
        lambda answers: _in_order(groups, answers, count, decorator),
        lambda position, answer: _in_order([groups[position]], [answer], count, decorator),
    )


def _in_order(groups: Sequence[Group], answers: Sequence[Any], count: int, decorator: str) -> list[Any]:
    """Return the responses of the groups in the order of the requests, None for requests without a group;
    raise BatchError unless a group has one response for each request.
    """
    responses: list[Any] = [None] * count
    for group, answer in zip(groups, answers, strict=True):
        if not isinstance(answer, Sequence) or len(answer) != len(group):
            kind = f"an object of type {type(answer).__name__}"
            given = len(answer) if isinstance(answer, Sequence) else kind
            raise BatchError(
                f"The function below {decorator} was given {len(group)} requests and must answer with a "
                f"list of as many responses, but answered with {given}"
            )
        for position, response in zip(group, answer, strict=True):
            responses[position] = response
    return responses


def _like(requests: Any, made: list[Any]) -> Any:
    if isinstance(requests, RequestBatch):
        return RequestBatch(made, requests.output_names, requests.batching, requests.ragged)
    return made


def row_count(data: Data) -> int:
    """Return the number of rows of a request; 1 if its first array has no axis."""
    first = next(iter(data.values()), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1


def join_data(data: Sequence[Data]) -> dict[str, Any]:
    """Return each input with the rows of all requests; raise BatchError if they do not go together."""
    if len(data) < 2:
        return dict(data[0]) if data else {}
    names = data[0].keys()
    for one in data:
        if one.keys() != names:
            raise BatchError(
                f"Cannot batch requests with different sets of inputs: one has {_listed(names)}, another "
                f"{_listed(one)}; put @group_by_keys or @fill_optionals above @batch"
            )
    return {name: _column(name, [one[name] for one in data]) for name in names}


def _column(name: str, arrays: list[Any]) -> Any:
    try:
        return concatenated(arrays)
    except ValueError:
        shapes = " and ".join(sorted({str(tuple(shape_of(one))) for one in arrays}))
        raise BatchError(
            f"Cannot batch requests whose input {name!r} has the shapes {shapes}: they may differ on the "
            "first axis only"
        ) from None


def shape_of(value: Any) -> Sequence[int]:
    """Return the shape of an array of any library, or of nested lists."""
    shape: Sequence[int] = value.shape if hasattr(value, "shape") else np.shape(value)
    return shape


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"


class SomeRows(NamedTuple):
    """Outputs for some rows of the batch, which ``group_by_values`` yields over a generator."""

    arrays: dict[str, Any]
    positions: Sequence[int]


def named(result: Any, output_names: Sequence[str]) -> Mapping[str, Any]:
    if type(result) is dict:
        return result
    try:
        return named_outputs(result, output_names)
    except OutputError as error:
        raise BatchError(str(error)) from None


def check_rows(outputs: Mapping[str, Any], rows: int) -> None:
    """Raise BatchError if the first axis of an output is not as long as the batch."""
    for name, value in outputs.items():
        shape = shape_of(value)
        if not shape or shape[0] != rows:
            raise BatchError(
                f"Received output {name!r} of shape {tuple(shape)}, but the batch has {rows} "
                f"{'row' if rows == 1 else 'rows'}: the first axis of every output must be as long"
            )


def each_changed(result: Any, change: Callable[[Any], Any]) -> Any:
    """Return outputs of the same form (mapping, list, one array), with ``change`` applied to each."""
    if isinstance(result, Mapping):
        return {name: change(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [change(value) for value in result]
    return change(result)


def per_request(answer: SomeRows, rows: Sequence[int]) -> list[dict[str, Any] | BatchError | None]:
    """Return each request's outputs, None without rows, or an error with only some rows."""
    places = {position: place for place, position in enumerate(answer.positions)}
    responses: list[dict[str, Any] | BatchError | None] = []
    stop = 0
    for count in rows:
        start, stop = stop, stop + count
        own = [places[position] for position in range(start, stop) if position in places]
        if not own:
            responses.append(None)
        elif len(own) == count:
            responses.append({name: rows_of(value, own) for name, value in answer.arrays.items()})
        else:
            text = "The rows of this request are in several groups of @group_by_values, which a generator "
            hint = "send them as requests of their own, or make their values equal"
            responses.append(BatchError(f"{text}answers one after the other: {hint}"))
    return responses


def rows_of(value: Any, positions: Sequence[int]) -> Any:
    """Return rows of an array in this order: a view if they are adjacent."""
    array = value if hasattr(value, "shape") else np.asarray(value)
    if not positions:
        return array[:0]
    first, last = positions[0], positions[-1]
    if list(positions) == list(range(first, last + 1)):
        return array[first : last + 1]
    return array[list(positions)]
