"""The parameters of an inference request over gRPC, held against the types that the protocol gives them.
Pure. What they ask for is in the request; whether the model can do it is said in ``validation``.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.v2.limits import MAX_PARAMETERS, check_count, check_entries, check_name, shown
from gpuserve.front.v2.sequence_parameters import END, ID, SEQUENCE_KEYS, START, sequence_of
from gpuserve.front.v2.types import Sequence

_CUSTOM_CHOICES: Final = frozenset({"bool_param", "int64_param", "string_param", "double_param"})
_INTEGER_CHOICES: Final = frozenset({"int64_param", "uint64_param"})
_EMPTY_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"


class RequestParameters(NamedTuple):
    """What a request's parameters say: those for the model, and those that the protocol reads itself."""

    custom: dict[str, Any]
    timeout_s: float | None = None
    priority: int = 0
    empty_final: bool = False
    sequence: Sequence | None = None


NO_PARAMETERS: Final = RequestParameters({})


def request_parameters(given: Any, model_name: str) -> RequestParameters:
    """What the ``parameters`` of a request say; InvalidArgument: a wrong type or value, or too many."""
    check_count("parameters", len(given), MAX_PARAMETERS, model_name)
    custom = {}
    timeout_us = priority = 0
    empty_final = in_sequence = False
    for key, value in given.items():
        check_name("parameter", key, model_name)
        choice = value.WhichOneof("parameter_choice")
        if key == "timeout":
            timeout_us = _not_negative(key, choice, value, "int64_param", model_name)
        elif key == "priority":
            priority = _not_negative(key, choice, value, "int64_param or uint64_param", model_name)
        elif key in SEQUENCE_KEYS:
            in_sequence = True
        elif key.startswith("triton_"):
            _check_reserved(key, choice, model_name)
            empty_final = value.bool_param
        elif choice in _CUSTOM_CHOICES:
            custom[key] = getattr(value, choice)
        else:
            raise _wrong_choice(key, "int64_param, bool_param, or string_param", choice, model_name)
    sequence = _sequence(given, model_name) if in_sequence else None
    return RequestParameters(custom, timeout_us / 1e6 or None, priority, empty_final, sequence)


def _sequence(given: Any, model_name: str) -> Sequence | None:
    correlation_id: Any = 0
    if ID in given:
        correlation_id = _choice(ID, given, ("int64_param", "string_param"), model_name)
    flags = [key in given and _choice(key, given, ("bool_param",), model_name) for key in (START, END)]
    return sequence_of(correlation_id, start=flags[0], end=flags[1])


def _choice(key: str, given: Any, expected: tuple[str, ...], model_name: str) -> Any:
    choice = given[key].WhichOneof("parameter_choice")
    if choice not in expected:
        raise _wrong_choice(key, " or ".join(expected), choice, model_name)
    return getattr(given[key], choice)


def _not_negative(key: str, choice: str | None, value: Any, expected: str, model_name: str) -> int:
    if choice not in _INTEGER_CHOICES:
        raise _wrong_choice(key, expected, choice, model_name)
    number: int = getattr(value, choice)
    if number < 0:
        raise InvalidArgument(
            f"invalid value for '{key}', expected value >= 0. The request for model "
            f"'{shown(model_name)}' gave {number}."
        )
    return number


def _check_reserved(key: str, choice: str | None, model_name: str) -> None:
    """There is one reserved key, for the end of a stream; a unary call may give it too."""
    if key != _EMPTY_FINAL_RESPONSE:
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
            f"starting with 'triton_' are allowed: {_EMPTY_FINAL_RESPONSE}. The request for model "
            f"'{shown(model_name)}' gave '{shown(key)}'."
        )
    if choice != "bool_param":
        raise _wrong_choice(key, "bool_param", choice, model_name)


def _wrong_choice(key: str, expected: str, given: str | None, model_name: str) -> InvalidArgument:
    return InvalidArgument(
        f"invalid value type for '{shown(key)}' parameter, expected {expected}. The request for model "
        f"'{shown(model_name)}' gave {given or 'no value'}."
    )


def tensor_parameters(given: Any) -> dict[str, Any]:
    """The ``parameters`` of a tensor as plain values; one without a value is None. InvalidArgument: there are
    too many.
    """
    check_entries("parameters of one tensor or model", given)
    values = {}
    for key, value in given.items():
        choice = value.WhichOneof("parameter_choice")
        values[key] = getattr(value, choice) if choice else None
    return values
