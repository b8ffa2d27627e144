"""Lists of requests, as callables without ``batch`` see them: read, joined, changed, taken apart. A request
is a ``Request`` or, where a callable is called by hand, any mapping of input names to arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpuserve.decorators.array_libraries import concatenated
from gpuserve.decorators.errors import BatchError
from gpuserve_worker.calling.request import Batch, Request, RequestBatch
from gpuserve_worker.protocol.payloads import WireRequest

Data: TypeAlias = Mapping[str, Any]
#: Positions of requests or rows that belong together.
Group: TypeAlias = list[int]


def last_of(args: tuple[Any, ...], decorator: str) -> tuple[tuple[Any, ...], Any]:
    """What comes before the requests in a call's positional arguments, and the requests. Raises ``TypeError``
    where there are none, as in a function below ``batch``, which is given arrays.
    """
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
    """Whether the arrays of these requests have a batch axis, as is taken of those without a server."""
    return bool(getattr(requests, "batching", True))


def joined(requests: Any, decorator: str) -> Batch:
    """The requests as one batch.

    Raises:
        TypeError: they are no list of requests.
        BatchError: they have different inputs, or inputs of different shapes.
    """
    if not is_request_list(requests):
        raise not_requests(decorator, requests)
    data = [data_of(one) for one in requests]
    rows = [row_count(one) for one in data]
    arrays = dict(data[0]) if len(data) == 1 else _concatenated(data)
    output_names = getattr(requests, "output_names", ())
    return Batch(arrays, [WireRequest(count, {}, ()) for count in rows], output_names, is_batching(requests))


def data_of(request: Any) -> Data:
    data: Data = request.data if isinstance(request, Request) else request
    return data


def changed(requests: Any, change: Callable[[Data], dict[str, Any]]) -> Any:
    """The same requests with other data; what is known of them besides stays known."""
    made = [one.with_data(change(one.data)) if isinstance(one, Request) else change(one) for one in requests]
    return _like(requests, made)


def taken(requests: Sequence[Any], positions: Sequence[int]) -> Any:
    """The requests at these positions, as a list of the same kind."""
    return _like(requests, [requests[position] for position in positions])


def grouped(labels: Iterable[Hashable]) -> list[Group]:
    """The positions of equal labels, in the order in which they first come."""
    groups: dict[Hashable, Group] = {}
    for position, label in enumerate(labels):
        groups.setdefault(label, []).append(position)
    return list(groups.values())


def put_back(groups: Sequence[Group], answers: Sequence[Any], count: int, decorator: str) -> list[Any]:
    """The responses of the groups in the order of the requests; None for those of no group.

    Raises:
        BatchError: a group was not answered with a response for each of its requests.
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
        return RequestBatch(made, requests.output_names, requests.batching)
    return made


def row_count(data: Data) -> int:
    """How many rows a request has; 1 where its first array has no axis."""
    first = next(iter(data.values()), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1


def _concatenated(data: Sequence[Data]) -> dict[str, Any]:
    if not data:
        return {}
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
        shapes = " and ".join(sorted({str(np.shape(one)) for one in arrays}))
        raise BatchError(
            f"Cannot batch requests whose input {name!r} has the shapes {shapes}: they may differ on the "
            "first axis only"
        ) from None


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"
