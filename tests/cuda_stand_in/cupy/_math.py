"""The functions of the module that compute: numpy's of the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from cupy._operators import elementwise, matmul, reduced

_ELEMENTWISE: Final = (
    *("abs", "absolute", "add", "bitwise_and", "bitwise_or", "bitwise_xor", "ceil", "cos", "divide", "equal"),
    *("exp", "floor", "floor_divide", "greater", "greater_equal", "invert", "isfinite", "isinf", "isnan"),
    *("less", "less_equal", "log", "log1p", "log2", "logical_and", "logical_not", "logical_or", "maximum"),
    *("minimum", "multiply", "negative", "not_equal", "power", "remainder", "rint", "sign", "sin", "sqrt"),
    *("square", "subtract", "tan", "tanh", "true_divide"),
)
_REDUCTIONS: Final = (
    *("all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "std", "sum", "var"),
)


def _clip(a: Any, a_min: Any, a_max: Any) -> Any:
    return a.clip(a_min, a_max)


def _reshape(a: Any, shape: Any) -> Any:
    return a.reshape(shape)


def _transpose(a: Any, axes: Any = None) -> Any:
    return a.transpose(axes)


def _of_elements(name: str) -> Callable[..., Any]:
    ufunc = getattr(np, name)
    return lambda *operands, out=None: elementwise(ufunc, *operands, out=out)


def _of_axes(name: str) -> Callable[..., Any]:
    function = getattr(np, name)
    return lambda a, axis=None, dtype=None, keepdims=False: reduced(function, a, axis, dtype, keepdims)


#: name -> function
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    **{name: _of_elements(name) for name in _ELEMENTWISE},
    **{name: _of_axes(name) for name in _REDUCTIONS},
    "clip": _clip,
    "dot": matmul,
    "matmul": matmul,
    "reshape": _reshape,
    "transpose": _transpose,
}
