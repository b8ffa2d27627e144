"""A DLPack capsule becomes an array of a library that can read it: numpy on the host, CuPy or torch on a GPU.
Only what a capsule says of its device is read here, never its elements.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final

import numpy as np

from gpuserve.python_backend.errors import TritonModelException

_NAMES: Final = (b"dltensor", b"dltensor_versioned")
_CPU: Final = 1
_CUDA_HOST: Final = 3
_CUDA: Final = frozenset({2, 13})
#: ``DLDataType.code`` of bfloat16, which numpy does not have.
_BFLOAT: Final = 4


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class _Versioned(ctypes.Structure):
    """What comes before the tensor in a capsule of DLPack 1.0."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


class _Holder:
    """A capsule as an array of an unknown library, which is how libraries take one over."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def array_of_capsule(capsule: Any) -> Any:
    """The array in a capsule, which is used up; ``TritonModelException``: no library here can read it."""
    tensor = _tensor_of(capsule)
    if tensor.device_type not in _CUDA | {_CPU, _CUDA_HOST}:
        raise TritonModelException(
            f"DLPack device type {tensor.device_type} is not supported: expected memory of the host or CUDA"
        )
    if tensor.device_type in _CUDA:
        return _read_by(("cupy", "torch"), capsule, tensor)
    if tensor.code == _BFLOAT:
        return _read_by(("torch",), capsule, tensor)
    return np.from_dlpack(_Holder(capsule, (_CPU, 0)))


def _tensor_of(capsule: Any) -> Any:
    is_valid, pointer_of = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    is_valid.argtypes = pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
    pointer_of.restype = ctypes.c_void_p
    for name, layout in zip(_NAMES, (_DLTensor, _Versioned), strict=True):
        if is_valid(capsule, name):
            found: Any = layout.from_address(pointer_of(capsule, name))
            return found.tensor if layout is _Versioned else found
    raise TritonModelException("the capsule is no DLPack tensor, or was used by another array already")


def _read_by(libraries: tuple[str, ...], capsule: Any, tensor: Any) -> Any:
    for name in libraries:
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        taken = _Holder(capsule, (tensor.device_type, tensor.device_id))
        return library.from_dlpack(taken)
    raise TritonModelException(f"a DLPack tensor like this needs {' or '.join(libraries)} installed")
