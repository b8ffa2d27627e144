"""Check of whether requests of a model can call its callable, before the first request arrives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

from gpuserve_worker.inference.callable_loading import makes_callable
from gpuserve_worker.inference.inference_request import argument_form_of
from gpuserve_worker.inference.stepping import is_stepped

#: A check of a decorated callable: from the callable, whether its first parameter is ``self``, the names of
#: the inputs, and whether these are all inputs, to the error, or None.
DecoratedCheck: TypeAlias = Callable[[Any, bool, Collection[str], bool], "str | None"]
#: The check of the decorators, once they are imported. The worker imports nothing of ``gpuserve``.
_decorated_checks: Final[list[DecoratedCheck]] = []


def set_decorated_check(check: DecoratedCheck) -> None:
    """Set the check of decorated callables. The decorators call this function when they are imported."""
    _decorated_checks[:] = [check]


def call_problem(
    target: Any,
    name: str,
    kwargs: Mapping[str, Any],
    inputs: Collection[str] | None,
    *,
    all_inputs: bool = True,
) -> str | None:
    """Return why a worker cannot call ``target``, a callable or a class, with requests that have ``inputs``
    (None: unknown), or None. Decorators from elsewhere may change the call, so nothing is said below them.
    Without ``all_inputs`` the callable may be given further inputs, such as the controls of sequences.
    """
    if is_stepped(target):
        return None
    is_class = isinstance(target, type)
    if is_class and not any("__call__" in vars(base) for base in target.__mro__):
        if target.__new__ is not object.__new__:
            return None  # a factory
        return f"{name!r} is a class without a method __call__(self, requests): its objects cannot be called"
    if not is_class and makes_callable(target, kwargs):
        return None
    called = target.__call__ if is_class else target
    is_method = is_class and not isinstance(inspect.getattr_static(target, "__call__"), staticmethod)
    if (form := argument_form_of(called)) is None:
        try:
            inspect.signature(called, follow_wrapped=False).bind(*([None] * is_method), [])
        except TypeError as error:
            text = f"{name!r} is called with one argument, a list of requests, but the call fails: {error}"
            return f"{text}; @batch passes each input as an argument" if "missing" in str(error) else text
        except ValueError:  # written in C without a signature
            pass
        return None
    for check in _decorated_checks:
        try:
            wrong = None if inputs is None else check(called, is_method, inputs, all_inputs)
        except TypeError as error:  # a parameter of a type that no request can carry
            return f"{name}: {error}"
        if wrong and inputs is not None:
            given = ", ".join(map(repr, inputs)) or "none"
            return f"{name!r} below @{form} is called with the declared inputs by name ({given}), but {wrong}"
    return None
