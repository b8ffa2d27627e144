"""Decorators that turn an inference callable over requests into one over arrays.

They stack, from the requests down to the function::

    @fill_optionals(k=...)  @group_by_keys     requests: lists of Request, or of plain mappings
    @batch | @sample                           requests become arrays, one keyword argument an input
    @group_by_values("k")  @first_value("k")   arrays
    @pad_batch                                 arrays
    @model_context                             either

Each works on functions, methods, ``functools.partial`` and objects with ``__call__``, plain, ``async``,
generator or async generator, and the decorated callable is of the same kind. It may be called by hand, as
tests do. This package is imported by user code inside workers, so nothing in it may import more than
numpy and ``gpuserve_worker``.
"""

from __future__ import annotations

from gpuserve.decorators.batching import batch, sample
from gpuserve.decorators.errors import (
    BatchError,
    DecoratorError,
    DefaultsError,
    NoModelError,
    StackError,
    ValuesError,
)
from gpuserve.decorators.grouping import group_by_keys, group_by_values
from gpuserve.decorators.padding import ConstantPadder, pad_batch
from gpuserve.decorators.values import fill_optionals, first_value, model_context
from gpuserve_worker.calling.context import ModelContext, current_model

__all__ = [
    "BatchError",
    "ConstantPadder",
    "DecoratorError",
    "DefaultsError",
    "ModelContext",
    "NoModelError",
    "StackError",
    "ValuesError",
    "batch",
    "current_model",
    "fill_optionals",
    "first_value",
    "group_by_keys",
    "group_by_values",
    "model_context",
    "pad_batch",
    "sample",
]
