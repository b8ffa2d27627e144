"""The model that is served, for decorators and for the functions below them."""

from __future__ import annotations

from typing import Any

from gpuserve.decorators.errors import BatchError, NoModelError
from gpuserve_worker.context import ModelContext, current_model


def model_or_none() -> ModelContext | None:
    """The model that is served here; None where the callable is called by hand."""
    try:
        return current_model()
    except LookupError:
        return None


def model_of(decorator: str) -> ModelContext:
    """The model that is served here.

    Raises:
        NoModelError: the callable is called by hand.
    """
    model = model_or_none()
    if model is None:
        raise NoModelError(
            f"{decorator} needs to know the model, but the callable was not called by a server"
        )
    return model


def check_model_batches(decorator: str) -> None:
    """Do nothing if the model batches, or where the callable is called by hand.

    Raises:
        BatchError: it does not.
    """
    model = model_or_none()
    if model is not None and not model.batching:
        raise not_batching(decorator)


def not_batching(decorator: str) -> BatchError:
    """The error of a decorator over rows, for a model whose requests have none."""
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
