"""Check of whether the inputs of a model fit the parameters of a decorated callable."""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection
from typing import Any, Final

from gpuserve.decorators.batching import requested_parameters
from gpuserve.decorators.wrapping import is_own_code
from gpuserve_worker.inference.callable_loading import is_required
from gpuserve_worker.inference.inference_request import function_of

_CONTEXT: Final = "model_context"


def input_problem(called: Any, is_method: bool, inputs: Collection[str], all_inputs: bool) -> str | None:
    """Return which parameter is no input, or which input no parameter takes, or None. A parameter may be an
    input that is not among ``inputs`` unless these are ``all_inputs``.
    """
    function = function_of(called)
    lengths = getattr(function, "lengths_arguments", ())
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        if not is_own_code(function.__code__):
            return None
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        return None
    others = {*requested_parameters(called), *lengths, _CONTEXT}
    try:
        parameters = list(inspect.signature(called).parameters.values())[is_method:]
    except (TypeError, ValueError):
        return None
    own = [one for one in parameters if one.name not in others]
    lacking = [one.name for one in own if is_required(one) and one.name not in inputs]
    any_name = any(one.kind is one.VAR_KEYWORD for one in own)
    surplus = [] if any_name else [one for one in inputs if one not in {named.name for named in own}]
    if lacking and all_inputs:
        return f"parameter {lacking[0]!r} is no input"
    return f"no parameter takes {surplus[0]!r}" if surplus else None
