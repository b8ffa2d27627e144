"""The operators and methods of arrays that compute, by numpy's functions of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_SCALARS = (bool, int, float, complex, np.generic)


def _binary(ufunc: Any) -> Callable[[Any, Any], Any]:
    return lambda self, other: elementwise(ufunc, self, other)


def _reflected(ufunc: Any) -> Callable[[Any, Any], Any]:
    return lambda self, other: elementwise(ufunc, other, self)


def _in_place(ufunc: Any) -> Callable[[Any, Any], Any]:
    return lambda self, other: elementwise(ufunc, self, other, out=self)


def _unary(ufunc: Any) -> Callable[[Any], Any]:
    return lambda self: elementwise(ufunc, self)


def _reduction(function: Any) -> Callable[..., Any]:
    def method(
        self: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> Any:
        return reduced(function, self, axis, dtype, keepdims)

    return method


class Operators:
    """What an array of numpy's shape can compute."""

    __add__, __radd__, __iadd__ = _binary(np.add), _reflected(np.add), _in_place(np.add)
    __sub__, __rsub__, __isub__ = _binary(np.subtract), _reflected(np.subtract), _in_place(np.subtract)
    __mul__, __rmul__, __imul__ = _binary(np.multiply), _reflected(np.multiply), _in_place(np.multiply)
    __truediv__, __rtruediv__ = _binary(np.true_divide), _reflected(np.true_divide)
    __itruediv__ = _in_place(np.true_divide)
    __floordiv__, __rfloordiv__ = _binary(np.floor_divide), _reflected(np.floor_divide)
    __mod__, __rmod__ = _binary(np.remainder), _reflected(np.remainder)
    __pow__, __rpow__ = _binary(np.power), _reflected(np.power)
    __and__, __rand__ = _binary(np.bitwise_and), _reflected(np.bitwise_and)
    __or__, __ror__ = _binary(np.bitwise_or), _reflected(np.bitwise_or)
    __xor__, __rxor__ = _binary(np.bitwise_xor), _reflected(np.bitwise_xor)
    __lshift__, __rshift__ = _binary(np.left_shift), _binary(np.right_shift)
    __lt__, __le__ = _binary(np.less), _binary(np.less_equal)
    __gt__, __ge__ = _binary(np.greater), _binary(np.greater_equal)
    __eq__, __ne__ = _binary(np.equal), _binary(np.not_equal)  # type: ignore[assignment]
    __neg__, __pos__ = _unary(np.negative), _unary(np.positive)
    __abs__, __invert__ = _unary(np.absolute), _unary(np.invert)

    sum, prod, mean = _reduction(np.sum), _reduction(np.prod), _reduction(np.mean)
    max, min = _reduction(np.max), _reduction(np.min)
    any, all = _reduction(np.any), _reduction(np.all)
    argmax, argmin = _reduction(np.argmax), _reduction(np.argmin)
    std, var = _reduction(np.std), _reduction(np.var)

    def __matmul__(self, other: Any) -> Any:
        return matmul(self, other)

    def dot(self, other: Any) -> Any:
        return matmul(self, other)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return elementwise(ufunc, *inputs, out=out[0] if out else None)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        import cupy

        own = getattr(cupy, function.__name__, None)
        return NotImplemented if own is None else own(*args, **kwargs)


def elementwise(ufunc: Any, *operands: Any, out: Any = None) -> Any:
    """A ufunc over arrays of the device and scalars. Raises TypeError: an operand is of another type."""
    from cupy._array import computed, ndarray

    for one in operands:
        if not isinstance(one, (ndarray, *_SCALARS)):
            raise TypeError(f"Unsupported type {type(one)}")
    shape = np.broadcast_shapes(*(one.shape for one in operands if isinstance(one, ndarray)))
    samples = [np.ones(1, one.dtype) if isinstance(one, ndarray) else one for one in operands]
    with np.errstate(all="ignore"):
        dtype = ufunc(*samples).dtype
    if out is None:
        return computed(ufunc, list(operands), shape, dtype)
    if not np.can_cast(dtype, out.dtype, "same_kind"):
        raise TypeError(f"output (typecode '{dtype.char}') could not be coerced to '{out.dtype.char}'")
    out[...] = computed(ufunc, list(operands), shape, dtype)
    return out


def reduced(function: Any, array: Any, axis: Any, dtype: Any, keepdims: bool) -> Any:
    """A reduction of numpy's over an array of the device."""
    from cupy._array import computed

    options = {"axis": axis, "keepdims": keepdims} | ({"dtype": dtype} if dtype else {})
    sample = function(np.ones((1,) * array.ndim, array.dtype), **options)
    chosen = range(array.ndim) if axis is None else np.atleast_1d(axis) % max(1, array.ndim)
    kept = [1 if place in chosen else size for place, size in enumerate(array.shape)]
    shape = kept if keepdims else [size for place, size in enumerate(array.shape) if place not in chosen]
    return computed(lambda values: function(values, **options), [array], tuple(shape), sample.dtype)


def matmul(left: Any, right: Any) -> Any:
    """The matrix product."""
    from cupy._array import computed
    from cupy._launch import require

    require("cublas")
    inner = right.shape[-2] if right.ndim > 1 else right.shape[0]
    if left.shape[-1] != inner:
        raise ValueError(f"matmul: shapes {left.shape} and {right.shape} do not fit")
    rows = np.empty((*left.shape[:-1], 0), left.dtype)
    columns = np.empty((*right.shape[:-2], 0, right.shape[-1]) if right.ndim > 1 else (0,), right.dtype)
    sample = np.matmul(rows, columns)
    return computed(np.matmul, [left, right], sample.shape, sample.dtype)
