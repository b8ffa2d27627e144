"""How arrays are made: from shapes, from the host, from other arrays of the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy._array import computed, from_host, ndarray
from cupy.cuda.memory import MemoryPointer, UnownedMemory
from cupy.cuda.stream import ExternalStream, get_current_stream

__all__ = [
    "arange",
    "array",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "broadcast_to",
    "concatenate",
    "empty",
    "empty_like",
    "expand_dims",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "stack",
    "where",
    "zeros",
    "zeros_like",
]

_LEGACY_STREAM = 1


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    made = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order)
    made.fill(fill_value)
    return made


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    made = empty(shape, dtype, order)
    made.data.memset_async(0, made.nbytes)
    return made


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def empty_like(prototype: ndarray, dtype: Any = None) -> ndarray:
    return empty(prototype.shape, dtype or prototype.dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return zeros(a.shape, dtype or a.dtype)


def ones_like(a: ndarray, dtype: Any = None) -> ndarray:
    return ones(a.shape, dtype or a.dtype)


def full_like(a: ndarray, fill_value: Any, dtype: Any = None) -> ndarray:
    return full(a.shape, fill_value, dtype or a.dtype)


def arange(*bounds: Any, dtype: Any = None) -> ndarray:
    return from_host(np.arange(*bounds, dtype=dtype))


def array(
    obj: Any, dtype: Any = None, copy: bool = True, order: str = "K", subok: bool = False, ndmin: int = 0
) -> ndarray:
    """An array of the device from anything: of the device, with ``__cuda_array_interface__``, of the host."""
    if isinstance(obj, ndarray):
        made = obj.astype(dtype or obj.dtype, copy=copy)
    elif hasattr(obj, "__cuda_array_interface__"):
        lent = _of_interface(obj)
        made = lent.astype(dtype or lent.dtype, copy=copy)
    elif isinstance(obj, list | tuple) and any(isinstance(one, ndarray) for one in obj):
        made = stack(list(obj)).astype(dtype or obj[0].dtype, copy=False)
    else:
        made = from_host(np.asarray(obj, dtype))
    return made.reshape((1,) * max(0, ndmin - made.ndim) + made.shape) if ndmin > made.ndim else made


def asarray(
    a: Any, dtype: Any = None, order: Any = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    made = array(a, dtype, copy=bool(copy))
    if blocking:
        get_current_stream().synchronize()
    return made


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    """As cupy's, it gives at least one axis."""
    made = asarray(a, dtype)
    made = made if made.shape else made.reshape(1)
    return made if made.flags.c_contiguous else made.copy()


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    """The values on the host, also of an array that is there already."""
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    if hasattr(a, "__cuda_array_interface__"):
        return asarray(a).get(stream, order, out, blocking)
    return np.asarray(a)


def concatenate(
    tup: Any,
    axis: int | None = 0,
    out: ndarray | None = None,
    *,
    dtype: Any = None,
    casting: str = "same_kind",
) -> ndarray:
    parts = [asarray(one) for one in tup]
    sample = np.concatenate([np.broadcast_to(np.ones((), one.dtype), one.shape) for one in parts], axis)
    joined = lambda *values: np.concatenate(values, axis)  # noqa: E731
    made = computed(joined, parts, sample.shape, np.dtype(dtype or sample.dtype))
    if out is None:
        return made
    out[...] = made
    return out


def stack(tup: Any, axis: int = 0) -> ndarray:
    return concatenate([expand_dims(one, axis) for one in tup], axis)


def expand_dims(a: ndarray, axis: int) -> ndarray:
    return a._viewed(lambda one: np.expand_dims(one, axis))


def broadcast_to(array: ndarray, shape: Any) -> ndarray:
    return array._viewed(lambda one: np.broadcast_to(one, shape))


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    operands = [condition, x, y]
    shape = np.broadcast_shapes(*(one.shape for one in operands if isinstance(one, ndarray)))
    samples = [np.ones(1, one.dtype) if isinstance(one, ndarray) else one for one in operands]
    return computed(np.where, operands, shape, np.where(*samples).dtype)


def _of_interface(obj: Any) -> ndarray:
    """The memory of an object of another library, which keeps it; the current stream waits for its stream."""
    described = obj.__cuda_array_interface__
    dtype, shape = np.dtype(described["typestr"]), tuple(described["shape"])
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = UnownedMemory(described["data"][0], nbytes, obj, -1 if nbytes else 0)
    _wait_for(described.get("stream"))
    strides = described.get("strides")
    return ndarray(shape, dtype, MemoryPointer(memory, 0), strides and tuple(strides))


def _wait_for(stream: int | None) -> None:
    if stream is not None and stream != (get_current_stream().ptr or _LEGACY_STREAM):
        get_current_stream().wait_event(ExternalStream(stream).record())
