"""The errors of the decorators, and the parts that all decorators share: checks of the function, a wrapper
that looks like the function, and access to the served model. Wrong uses that are visible at once raise
``TypeError``.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import CodeType
from typing import Any, Final, TypeAlias, TypeVar, cast

import numpy as np

from gpuserve_worker.inference.inference_request import accept_batch, accepts_batch, function_of
from gpuserve_worker.inference.model_context import ModelContext, current_model


class DecoratorError(Exception):
    """The base class of the errors that decorators raise."""


class BatchError(DecoratorError, ValueError):
    """Requests, inputs or outputs of a batch that do not fit together."""


class _Code(enum.Enum):
    """The gRPC status of an error, by the names of the server's codes, which this package does not import."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"


class RequestError(DecoratorError, ValueError):
    """A request with a value that the function cannot be called with; the client gets INVALID_ARGUMENT."""

    code: Final = _Code.INVALID_ARGUMENT


class ValuesError(DecoratorError, ValueError):
    """Rows that are not equal where they must be, or cannot be padded to each other."""


class DefaultsError(DecoratorError, ValueError):
    """A default of ``fill_optionals`` that does not fit the model."""


class StackError(DecoratorError, RuntimeError):
    """A decorator on the wrong side of another one."""


class NoModelError(DecoratorError, LookupError):
    """A decorator that needs the model, in a callable that was not called by a server."""


InferenceCallable: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=InferenceCallable)
#: Forms of the arguments below a decorator: the rows of a batch, or one request.
BATCH: Final = "batch"
SAMPLE: Final = "sample"

_OWN_DIRECTORY: Final = os.path.dirname(__file__) + os.sep
#: The interpreter's texts for calls that do not fit a signature.
_MISFITS: Final = ("() got ", "() missing ", "() takes ")


def served_model() -> ModelContext | None:
    """Return the served model, or None if the callable is called directly."""
    try:
        return current_model()
    except LookupError:
        return None


def model_of(decorator: str) -> ModelContext:
    model = served_model()
    if model is None:
        raise NoModelError(
            f"{decorator} needs to know the model, but the callable was not called by a server"
        )
    return model


def check_model_batches(decorator: str) -> None:
    model = served_model()
    if model is not None and not model.batching:
        raise not_batching(decorator)


def not_batching(decorator: str) -> BatchError:
    return BatchError(
        f"The {decorator} decorator can only be used with models that batch, but this one does not"
    )


class RowLengths(np.ndarray):
    """The lengths of the rows of a padded input, an argument of a function under ``batch``."""


def has_batch_axis(name: str, value: Any, rows: int) -> bool:
    """Return whether an argument of a function under ``batch`` is an array ``[rows, …]`` of an input, or the
    lengths of its rows; one row that ``first_value`` selected is not.
    """
    shape = getattr(value, "shape", ())
    if not shape or shape[0] != rows:
        return False
    model = served_model()
    if model is None or isinstance(value, RowLengths):
        return True
    return any(one.name == name and len(one.shape) + 1 == len(shape) for one in model.inputs)


def checked_function(function: F | None, decorator: str) -> F:
    """Return the function; raise TypeError if it is a class or cannot be called."""
    if function is None:
        raise TypeError(f"{decorator} is written without parentheses, over the function that it decorates")
    if isinstance(function, type):
        raise TypeError(
            f"{decorator} was put on the class {function.__name__}; expected a function or a method: "
            "put it on the method __call__"
        )
    if isinstance(function, classmethod):
        raise TypeError(f"{decorator} was put on a classmethod; put it below @classmethod")
    if not callable(function):
        raise TypeError(
            f"{decorator} was put on an object of type {type(function).__name__}, which cannot be called; "
            "expected a function, a method, or an object with __call__"
        )
    return function


def check_names(names: tuple[Any, ...], decorator: str) -> None:
    """Raise TypeError unless a decorator was given names of inputs. Forgotten parentheses pass a function."""
    if names and all(isinstance(name, str) for name in names):
        return
    given = "none" if not names else f"an object of type {type(names[0]).__name__}"
    raise TypeError(f"{decorator} is given names of inputs, as {decorator}('name'), but was given {given}")


def check_below_batch(function: Any, decorator: str) -> None:
    if accepts_batch(function):
        raise StackError(
            f"{decorator} works on the arrays that @batch makes of requests: put it below @batch, "
            "nearer to the function"
        )


def hints_of(function: Any) -> dict[str, Any]:
    """Return the annotations of a callable as objects, or {} if they cannot be evaluated."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return typing.get_type_hints(inspect.unwrap(function_of(function) or function), include_extras=True)
    except Exception:  # annotations are user code; the description of the model reports their errors
        return {}


def wraps(function: F) -> Callable[[InferenceCallable], F]:
    """Return ``functools.wraps`` that also works for objects with ``__call__`` and for partials.

    The signature and the kind of the wrapper are those of the method.
    """
    source = _as_function(function)

    def wrap(wrapper: InferenceCallable) -> F:
        functools.update_wrapper(wrapper, _innermost(source))
        wrapper.__wrapped__ = source  # type: ignore[attr-defined]
        return cast("F", wrapper)

    return wrap


def wraps_request_list(function: F) -> Callable[[InferenceCallable], F]:
    """Return ``wraps`` for a decorator that accepts a ``Batch`` if the function below does."""

    def mark(wrapper: InferenceCallable) -> F:
        wrapped = wraps(function)(wrapper)
        if accepts_batch(function):
            accept_batch(wrapped)
        return wrapped

    return mark


def is_misfit(error: TypeError) -> bool:
    """Return whether a TypeError is a decorator's call with arguments that the function does not take."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    called_by_us = frames is not None and is_own_code(frames.tb_frame.f_code)
    return called_by_us and any(words in str(error) for words in _MISFITS)


def is_own_code(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN_DIRECTORY)


def misfit(error: TypeError, function: Any, inputs: Iterable[str]) -> TypeError:
    names = list(inputs)
    given = f"the inputs {', '.join(names)}" if names else "no inputs"
    shown = name_of(function)
    with suppress(TypeError, ValueError):  # a function in C without a signature
        shown = f"{shown}({', '.join(inspect.signature(function).parameters)})"
    model, hint = served_model(), ""
    absent = [one.name for one in model.inputs if one.optional and one.name not in names] if model else []
    if absent:
        hint = (
            f"; {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} optional and not in the request: "
        )
        hint += "give the parameter a default value, or use @fill_optionals"
    return TypeError(f"{shown} cannot be called with {given}: {error}{hint}")


def name_of(function: Any) -> str:
    named = _innermost(function)
    return str(getattr(named, "__name__", type(named).__name__))


def _as_function(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return functools.partial(_as_function(function.func), *function.args, **function.keywords)
    return function if hasattr(function, "__name__") else function.__call__


def _innermost(function: Any) -> Any:
    return _innermost(function.func) if isinstance(function, functools.partial) else function
