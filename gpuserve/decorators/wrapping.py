"""What every decorator needs: checks of the function that it is put on, a wrapper that looks like it, and the
model that is served. What the wrapper does is not known here.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias, TypeVar, cast

from gpuserve.decorators.errors import BatchError, NoModelError, StackError
from gpuserve_worker.calling.context import ModelContext, current_model
from gpuserve_worker.calling.request import accept_batch, accepts_batch, function_of

InferenceCallable: TypeAlias = Callable[..., Any]
#: A function that a decorator leaves to type checkers as it is.
F = TypeVar("F", bound=InferenceCallable)
#: What a function below a decorator is given: the rows of a batch, or one request.
BATCH: Final = "batch"
SAMPLE: Final = "sample"
_FORM: Final = "_gpuserve_form"

_OWN_DIRECTORY: Final = os.path.dirname(__file__) + os.sep
#: How the interpreter words a call that does not fit a signature.
_MISFITS: Final = ("() got ", "() missing ", "() takes ")


def model_or_none() -> ModelContext | None:
    """The model that is served here; None where the callable is called by hand."""
    try:
        return current_model()
    except LookupError:
        return None


def model_of(decorator: str) -> ModelContext:
    """The model that is served here. Raises ``NoModelError`` where the callable is called by hand."""
    model = model_or_none()
    if model is None:
        raise NoModelError(
            f"{decorator} needs to know the model, but the callable was not called by a server"
        )
    return model


def check_model_batches(decorator: str) -> None:
    """Check that the model batches, where the callable is not called by hand. Raises ``BatchError`` where
    it does not.
    """
    model = model_or_none()
    if model is not None and not model.batching:
        raise not_batching(decorator)


def not_batching(decorator: str) -> BatchError:
    return BatchError(
        f"The {decorator} decorator can only be used with models that batch, but this one does not"
    )


def has_batch_axis(name: str, value: Any, rows: int) -> bool:
    """Whether an argument of a function under ``batch`` is an array ``[rows, …]``: an input, and neither
    one row of it that ``first_value`` took nor something else that was passed along.
    """
    shape = getattr(value, "shape", ())
    if not shape or shape[0] != rows:
        return False
    model = model_or_none()
    if model is None:
        return True
    return any(one.name == name and len(one.shape) + 1 == len(shape) for one in model.inputs)


def checked_function(function: F | None, decorator: str) -> F:
    """The function, if it can be decorated. Raises ``TypeError`` where it is a class, or cannot be called."""
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
    """Check that a decorator was given names of inputs. Raises ``TypeError`` where there is none, or one
    is no string, as when parentheses were forgotten.
    """
    if names and all(isinstance(name, str) for name in names):
        return
    given = "none" if not names else f"an object of type {type(names[0]).__name__}"
    raise TypeError(f"{decorator} is given names of inputs, as {decorator}('name'), but was given {given}")


def check_below_batch(function: Any, decorator: str) -> None:
    """Check that a decorator over arrays is not put over one that makes them. Raises ``StackError`` where
    it is.
    """
    if accepts_batch(function):
        raise StackError(
            f"{decorator} works on the arrays that @batch makes of requests: put it below @batch, "
            "nearer to the function"
        )


def gives(form: str, wrapper: InferenceCallable) -> None:
    """Note what the function in a wrapper is given; what is put over the wrapper takes the note along."""
    setattr(wrapper, _FORM, form)


def form_of(called: Any) -> str | None:
    """BATCH or SAMPLE for a callable that is decorated so, of whatever kind it is; None for others."""
    while isinstance(called, functools.partial):
        called = called.func
    form: str | None = getattr(called, _FORM, None) or getattr(function_of(called), _FORM, None)
    return form


def wraps(function: F) -> Callable[[InferenceCallable], F]:
    """As ``functools.wraps``, also over objects with ``__call__`` and partials of them: the signature and
    the kind of the wrapper are those of the method.
    """
    source = _as_function(function)

    def wrap(wrapper: InferenceCallable) -> F:
        functools.update_wrapper(wrapper, _innermost(source))
        wrapper.__wrapped__ = source  # type: ignore[attr-defined]
        return cast("F", wrapper)

    return wrap


def wraps_request_list(function: F) -> Callable[[InferenceCallable], F]:
    """``wraps`` for a decorator that may be given a ``Batch`` if the function below may."""

    def mark(wrapper: InferenceCallable) -> F:
        wrapped = wraps(function)(wrapper)
        if accepts_batch(function):
            accept_batch(wrapped)
        return wrapped

    return mark


def is_misfit(error: TypeError) -> bool:
    """Whether this came from calling a function with arguments that it does not take, by a decorator."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    called_by_us = frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN_DIRECTORY)
    return called_by_us and any(words in str(error) for words in _MISFITS)


def misfit(error: TypeError, function: Any, inputs: Iterable[str]) -> TypeError:
    names = list(inputs)
    given = f"the inputs {', '.join(names)}" if names else "no inputs"
    return TypeError(f"{_shown(function)} cannot be called with {given}: {error}{_hint(names)}")


def name_of(function: Any) -> str:
    named = _innermost(function)
    return str(getattr(named, "__name__", type(named).__name__))


def _as_function(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return functools.partial(_as_function(function.func), *function.args, **function.keywords)
    return function if hasattr(function, "__name__") else function.__call__


def _innermost(function: Any) -> Any:
    return _innermost(function.func) if isinstance(function, functools.partial) else function


def _shown(function: Any) -> str:
    name = name_of(function)
    try:
        return f"{name}({', '.join(inspect.signature(function).parameters)})"
    except (TypeError, ValueError):  # written in C without a signature
        return name


def _hint(names: list[str]) -> str:
    model = model_or_none()
    absent = [one.name for one in model.inputs if one.optional and one.name not in names] if model else []
    if not absent:
        return ""
    return (
        f"; {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} optional and not in the request: "
        "give the parameter a default value, or use @fill_optionals"
    )
