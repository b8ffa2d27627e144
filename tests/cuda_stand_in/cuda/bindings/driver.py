"""The stand-in for ``cuda.bindings.driver``."""

from __future__ import annotations

import enum
from typing import Any

CUresult = enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0})


def cuGetErrorString(error: Any) -> tuple[Any, bytes]:
    return CUresult.CUDA_SUCCESS, b"unknown error"


def cuDeviceGet(ordinal: int) -> tuple[Any, int]:
    return CUresult.CUDA_SUCCESS, ordinal


def cuDevicePrimaryCtxGetState(device: int) -> tuple[Any, int, int]:
    """The flags, and whether the context is there: it is, of whoever asks for a device that it had before."""
    return CUresult.CUDA_SUCCESS, 0, 1
