"""Decorators that turn an inference callable over requests into a callable over arrays.

They stack, from the requests down to the function::

    @fill_optionals(k=...)  @group_by_keys     requests: lists of Request, or of plain mappings
    @batch | @sample                           requests become arrays, one keyword argument an input
    @group_by_values("k")  @first_value("k")   arrays
    @pad_batch                                 arrays
    @model_context                             either

Each decorator works on functions, methods, ``functools.partial`` and objects with ``__call__``, plain,
``async``, generator or async generator, and the decorated callable is of the same kind. It may be called
directly, as in tests. User code imports this package inside workers, so it imports only numpy and
``gpuserve_worker``.
"""

from __future__ import annotations

from gpuserve.decorators.batching import batch, sample
from gpuserve.decorators.call_check import input_problem
from gpuserve.decorators.grouping import ConstantPadder, group_by_keys, group_by_values, pad_batch
from gpuserve.decorators.values import fill_optionals, first_value, model_context
from gpuserve.decorators.wrapping import (
    BatchError,
    DecoratorError,
    DefaultsError,
    NoModelError,
    StackError,
    ValuesError,
)
from gpuserve_worker.inference.call_check import set_decorated_check
from gpuserve_worker.inference.model_context import ModelContext, current_model

__all__ = [
    "BatchError", "ConstantPadder", "DecoratorError", "DefaultsError", "ModelContext", "NoModelError",
    "StackError", "ValuesError", "batch", "current_model", "fill_optionals", "first_value", "group_by_keys",
    "group_by_values", "model_context", "pad_batch", "sample",
]  # fmt: skip

set_decorated_check(input_problem)
