"""A stand-in for cupy 14 on a machine without a GPU: what an inference server and its callables use of it,
over the machine that ``CUDA_STAND_IN`` names. Names, signatures and errors are cupy's.
"""

from cupy import _installed  # isort: skip - before all else, which needs a machine
import sys as _sys

import numpy as _numpy

from cupy import _creation, _math, cuda
from cupy._array import ndarray
from cupy._dlpack import from_dlpack

__version__ = "14.2.0"
_DTYPES = (
    *("bool_", "complex64", "complex128", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
globals().update({name: getattr(_numpy, name) for name in (*_DTYPES, "dtype", "newaxis", "pi", "inf", "nan")})
globals().update({name: getattr(_creation, name) for name in _creation.__all__})
globals().update(_math.FUNCTIONS)


def get_default_memory_pool() -> cuda.MemoryPool:
    """The pool that arrays are from."""
    return cuda.memory.default_pool


def get_default_pinned_memory_pool() -> cuda.PinnedMemoryPool:
    """The pool that page-locked memory is from."""
    return cuda.pinned_memory.default_pool


def get_array_module(*args: object) -> object:
    """cupy where an argument is an array of the device, numpy else."""
    return _sys.modules[__name__] if any(isinstance(one, ndarray) for one in args) else _numpy


__all__ = [
    "_installed",
    "cuda",
    "from_dlpack",
    "get_array_module",
    "get_default_memory_pool",
    "get_default_pinned_memory_pool",
    "ndarray",
]
