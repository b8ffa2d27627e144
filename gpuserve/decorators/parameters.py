"""``Parameter``: a parameter of the request as a parameter of the function, under ``batch`` and ``sample``.
Requests of a batch with other values are other calls. Annotations are read at the first call, when all that
they name is there.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

from gpuserve.decorators.errors import DecoratorError
from gpuserve.decorators.requests import grouped, put_back, taken
from gpuserve.decorators.results import in_turn
from gpuserve_worker.calling.callable import CallableKind, kind_of
from gpuserve_worker.calling.request import Batch, function_of

T = TypeVar("T")


class _Mark(enum.Enum):
    """Marks a parameter whose values come with the request."""

    OF_REQUEST = "a parameter of the request"


#: ``top: Parameter[int] = 5``: a request may carry it beside its tensors, an int, float, bool or str; or None
#: where it carries none.
Parameter: TypeAlias = Annotated[T, _Mark.OF_REQUEST]

#: What a value may be for each kind, and how that is said.
_KINDS: Final[dict[type, tuple[tuple[type, ...], str]]] = {
    bool: ((bool,), "a bool"),
    int: ((int,), "an int"),
    float: ((float, int), "a float"),
    str: ((str,), "a str"),
}
_SHOWN: Final = 64


class _Code(enum.Enum):
    """What a client is told of it; by the names of the server's codes, which are not known here."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"


class ParameterError(DecoratorError, ValueError):
    """A request has another value for a parameter than the function takes, or lacks one that it needs."""

    code: Final = _Code.INVALID_ARGUMENT


class Asked(NamedTuple):
    """A parameter that the function takes. ``default`` is ``inspect.Parameter.empty`` where there is none."""

    name: str
    kind: type
    default: Any

    def value(self, parameters: Mapping[str, Any]) -> Any:
        """Its value in a request. Raises ParameterError."""
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


def asked_parameters(function: Any) -> dict[str, Asked]:
    """The parameters of the request that a function takes, by name. Raises TypeError: one has a type that no
    request can carry.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C without a signature
        return {}
    hints = _hints(function)
    return {
        name: Asked(name, parameter_kind(name, hints[name]), parameters[name].default)
        for name in parameters
        if is_parameter_type(hints.get(name))
    }


def without(asked: Mapping[str, Asked], given: Mapping[str, Any]) -> dict[str, Asked]:
    """Those that are not given already, as by a partial."""
    return {name: one for name, one in asked.items() if name not in given}


def _hints(function: Any) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return typing.get_type_hints(inspect.unwrap(function_of(function) or function), include_extras=True)
    except (
        Exception
    ):  # annotations are code of the user's; where tensors are in them that is told at the start
        return {}


def parameter_kind(name: str, hint: Any) -> type:
    """What values a ``Parameter`` has. Raises TypeError: those that no request can carry."""
    inner = hint.__origin__
    if typing.get_origin(inner) in {typing.Union, types.UnionType}:
        (inner,) = [one for one in typing.get_args(inner) if one is not type(None)] or [None]
    if inner not in _KINDS:
        raise TypeError(f"Parameter {name!r} must be an int, float, bool or str, but its type is {inner!r}")
    kind: type = inner
    return kind


def by_parameters(call: Callable[..., Any], function: Any, asked: Mapping[str, Asked], requests: Any) -> Any:
    """What ``call`` gives for the requests, with the values of their parameters by keyword: called once for
    all requests of equal values. A request with a wrong value gets the error as its response.
    """
    of_batch = isinstance(requests, Batch)
    given = [one[1] for one in requests.requests] if of_batch else [_parameters_of(one) for one in requests]
    labels = [_values(asked, one) for one in given]
    groups = grouped(labels)
    if len(groups) == 1 and isinstance(labels[0], tuple):
        return call(requests, **dict(zip(asked, labels[0], strict=True)))
    listed = requests.as_list() if of_batch else requests
    calls = [_call(call, function, asked, labels[group[0]], taken(listed, group)) for group in groups]

    def spread(position: int, responses: Any) -> list[Any]:
        return put_back([groups[position]], [responses], len(listed), "Parameter")

    return in_turn(calls, lambda answers: put_back(groups, answers, len(listed), "Parameter"), spread)


def _parameters_of(request: Any) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = getattr(request, "parameters", {})
    return parameters


def _values(asked: Mapping[str, Asked], parameters: Mapping[str, Any]) -> Any:
    """The values, or the error that the request gets in place of an answer."""
    try:
        return tuple(one.value(parameters) for one in asked.values())
    except ParameterError as error:
        return error


def _call(
    call: Callable[..., Any], function: Any, asked: Mapping[str, Asked], label: Any, requests: Any
) -> Callable[[], Any]:
    if isinstance(label, ParameterError):
        return partial(_refusal, kind_of(function), [label] * len(requests))
    return partial(call, requests, **dict(zip(asked, label, strict=True)))


def _refusal(kind: CallableKind, answer: list[ParameterError]) -> Any:
    """An answer that comes as those of a function of this kind do."""
    match kind:
        case CallableKind.COROUTINE:
            return _later(answer)
        case CallableKind.GENERATOR:
            return _once(answer)
        case CallableKind.ASYNC_GENERATOR:
            return _once_later(answer)
        case _:
            return answer


async def _later(answer: Any) -> Any:
    return answer


def _once(answer: Any) -> Iterator[Any]:
    yield answer


async def _once_later(answer: Any) -> AsyncIterator[Any]:
    yield answer
