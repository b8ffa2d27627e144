"""``model_context``: the function is told which model it serves."""

from __future__ import annotations

import inspect
from typing import Any

from gpuserve.decorators.context import model_of
from gpuserve.decorators.wrapping import InferenceCallable, checked_function, name_of, wraps_request_list

_ARGUMENT = "model_context"


def model_context(decorated: InferenceCallable | None = None, /) -> InferenceCallable:
    """Give the function the keyword argument ``model_context``, a ``ModelContext``; anywhere in the stack.

    A caller that passes one itself, as a test may, is believed.

    Raises:
        TypeError: this is no function, or it does not take the argument.
        NoModelError: (when called) not by a server.
    """
    function = checked_function(decorated, "@model_context")
    _check_parameter(function)

    @wraps_request_list(function)
    def call(*args: Any, **given: Any) -> Any:
        if _ARGUMENT not in given:
            given[_ARGUMENT] = model_of("@model_context")
        return function(*args, **given)

    return call


def _check_parameter(function: InferenceCallable) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C without a signature
        return
    if _ARGUMENT in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    taken = f"{name_of(function)}({', '.join(parameters)})"
    raise TypeError(f"@model_context passes the keyword argument {_ARGUMENT}, which {taken} does not take")
