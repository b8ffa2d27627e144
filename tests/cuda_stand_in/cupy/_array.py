"""The stand-in for ``cupy.ndarray``: device memory with a shape. Whatever computes is queued on the current
stream; whatever brings values to the host waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy import _dlpack
from cupy._launch import Layout, launch, launch_in_place
from cupy._operators import Operators
from cupy.cuda.device import Device
from cupy.cuda.memory import MemoryPointer, alloc
from cupy.cuda.stream import get_current_stream

_KINDS = "biufc"
_BFLOAT16 = "bfloat16"
_INTERFACE_VERSION = 3
_LEGACY_STREAM = 1


class ndarray(Operators):
    """An array in device memory."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        self.shape = tuple(shape) if isinstance(shape, tuple | list) else (int(shape),)
        self.dtype = check_dtype(dtype)
        self.strides = strides or _strides(self.shape, self.dtype.itemsize, order)
        self.data = memptr or alloc(self.nbytes)
        self.base: ndarray | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> Device:
        return self.data.device

    @property
    def flags(self) -> Any:
        return self._dummy().flags

    @property
    def _layout(self) -> Layout:
        """Where it is: what kernels are given."""
        return Layout(self.data.ptr, self.shape, self.strides, self.dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": get_current_stream().ptr or _LEGACY_STREAM,
            "version": _INTERFACE_VERSION,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
        }

    def __array__(self, dtype: Any = None, copy: Any = None) -> None:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> _dlpack.PyCapsule:
        return _dlpack.export(self, stream, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CUDA, self.data.device_id

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> np.ndarray[Any, Any]:
        """The values, on the host."""
        target = np.empty(self.shape, self.dtype) if out is None else out
        with self.device:
            source = self if self.flags.c_contiguous else self.copy()
            stream = stream or get_current_stream()
            source.data.copy_to_host_async(target.ctypes.data, self.nbytes, stream)
            if blocking:
                stream.synchronize()
        return target

    def set(self, arr: np.ndarray[Any, Any], stream: Any = None) -> None:
        """Copy values from the host."""
        if arr.shape != self.shape or not self.flags.c_contiguous:
            raise ValueError("Shape mismatch")
        source = np.ascontiguousarray(arr, self.dtype)
        self.data.copy_from_host_async(source.ctypes.data, self.nbytes, stream)

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes()

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        wanted = check_dtype(dtype)
        if wanted == self.dtype and not copy:
            return self
        return computed(lambda values: values, [self], self.shape, wanted)

    def clip(self, min: Any = None, max: Any = None) -> ndarray:  # noqa: A002
        return computed(np.clip, [self, min, max], self.shape, self.dtype)

    def copy(self, order: str = "C") -> ndarray:
        return self.astype(self.dtype)

    def fill(self, value: Any) -> None:
        self[...] = value

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:  # noqa: A002
        return self._viewed(lambda one: one.view(check_dtype(dtype or self.dtype)))

    def reshape(self, *shape: Any, order: str = "C", copy: Any = None) -> ndarray:
        wanted = _resolved(self.size, shape[0] if len(shape) == 1 else shape)
        source = self if self.flags.c_contiguous else self.copy()
        return source._view(0, wanted, _strides(wanted, self.itemsize, "C"), self.dtype)

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    def flatten(self, order: str = "C") -> ndarray:
        return self.copy().reshape(-1)

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._viewed(lambda one: one.squeeze(axis))

    def transpose(self, *axes: Any) -> ndarray:
        return self._viewed(lambda one: one.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self._viewed(lambda one: one.swapaxes(axis1, axis2))

    @property
    def T(self) -> ndarray:
        return self.transpose()

    def __getitem__(self, key: Any) -> ndarray:
        host_key = on_host(key)
        if not _is_gather(host_key):
            return self._viewed(lambda one: one[_whole_key(host_key)])
        result = np.lib.stride_tricks.as_strided(np.empty(1, self.dtype), self.shape, (0,) * self.ndim)[
            host_key
        ]
        return computed(lambda values: values[host_key], [self], result.shape, self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray | list):
            value = from_host(np.asarray(value, self.dtype))
        host_key = on_host(key)

        def assign(values: np.ndarray[Any, Any], new: Any) -> None:
            values[host_key] = new

        launch_in_place(assign, self._layout, [value._layout if isinstance(value, ndarray) else value])

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def _viewed(self, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> ndarray:
        """The view that numpy would give."""
        before = self._dummy()
        after = np.asanyarray(change(before))
        return self._view(_address(after) - _address(before), after.shape, after.strides, after.dtype)

    def _view(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> ndarray:
        made = ndarray(shape, dtype, self.data + offset, strides)
        made.base = self if self.base is None else self.base
        return made

    def _dummy(self) -> np.ndarray[Any, Any]:
        """An array of the same layout that is not to be read."""
        return np.lib.stride_tricks.as_strided(np.empty(1, self.dtype), self.shape, self.strides)


def computed(
    function: Callable[..., Any], operands: list[Any], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> ndarray:
    """A new array, into which a kernel of the current stream puts what ``function`` gives."""
    target = ndarray(shape, dtype)
    launch(function, [one._layout if isinstance(one, ndarray) else one for one in operands], target._layout)
    return target


def from_host(values: np.ndarray[Any, Any]) -> ndarray:
    """A new array with values from the host, which are copied on the current stream."""
    check_dtype(values.dtype)
    target = ndarray(values.shape, values.dtype)
    target.set(values)
    return target


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """Raises ValueError: cupy has no such arrays."""
    wanted = np.dtype(dtype)
    if wanted.kind not in _KINDS and wanted.name != _BFLOAT16:
        raise ValueError(f"Unsupported dtype {wanted}")
    return wanted


def on_host(key: Any) -> Any:
    """An index with its arrays on the host; as in cupy, that waits for those of the device."""
    if isinstance(key, tuple):
        return tuple(on_host(one) for one in key)
    return key.get() if isinstance(key, ndarray) else key


def _is_gather(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return any(isinstance(one, np.ndarray | list) for one in parts)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _strides(shape: tuple[int, ...], itemsize: int, order: str) -> tuple[int, ...]:
    sizes = shape if order == "F" else shape[::-1]
    steps = [itemsize * math.prod(max(1, one) for one in sizes[:place]) for place in range(len(sizes))]
    return tuple(steps if order == "F" else steps[::-1])


def _resolved(size: int, shape: Any) -> tuple[int, ...]:
    """A shape with its -1 replaced."""
    wanted = tuple(shape) if isinstance(shape, tuple | list) else (int(shape),)
    rest = math.prod(one for one in wanted if one != -1)
    full = tuple(size // max(1, rest) if one == -1 else one for one in wanted)
    if math.prod(full) != size:
        raise ValueError(f"cannot reshape array of size {size} into shape {wanted}")
    return full


def _whole_key(key: Any) -> Any:
    """The same key, with which numpy gives a view of a single element as well, and no copy of it."""
    keys = key if isinstance(key, tuple) else (key,)
    return keys if any(one is Ellipsis for one in keys) else (*keys, ...)
