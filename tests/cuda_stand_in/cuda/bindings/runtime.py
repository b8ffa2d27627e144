"""The stand-in for ``cuda.bindings.runtime``: names, signatures and results as cuda-python has them."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from typing import Any, Final

from cuda_simulation.errors import WORDS, CUDARuntimeError
from cupy.cuda import runtime

CUDA_IPC_HANDLE_SIZE: Final = 64
#: ``cudaErrorCudartUnloading``.
_UNLOADING: Final = 4

cudaError_t = enum.IntEnum("cudaError_t", {name: number for number, (name, _) in WORDS.items()})  # type: ignore[misc]
cudaMemcpyKind = enum.IntEnum("cudaMemcpyKind", {"cudaMemcpyDefault": runtime.memcpyDefault})
cudaDeviceAttr = enum.IntEnum(
    "cudaDeviceAttr", {"cudaDevAttrUnifiedAddressing": runtime.cudaDevAttrUnifiedAddressing}
)


class cudaStream_t(int):
    """A stream; a number here."""

    def getPtr(self) -> int:
        return int(self)


class cudaIpcMemHandle_t:
    """A handle; its bytes are at ``getPtr()``."""

    def __init__(self, handle: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(handle, CUDA_IPC_HANDLE_SIZE)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


def _told(call: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    try:
        result = call(*arguments)
    except CUDARuntimeError as error:
        return (cudaError_t(error.status),)
    success = cudaError_t(0)
    return (success,) if result is None else (success, result)


def _told_until_the_end(call: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """CUDA itself is still there when the interpreter ends; the simulation is not, and has let go of all."""
    told = _told(call, *arguments)
    return (cudaError_t(0),) if told[0] == _UNLOADING else told


def cudaGetErrorString(error: Any) -> tuple[Any, bytes]:
    return cudaError_t(0), WORDS[int(error)][1].encode()


def cudaGetDevice() -> tuple[Any, ...]:
    return _told(runtime.getDevice)


def cudaSetDevice(device: int) -> tuple[Any, ...]:
    return _told(runtime.setDevice, device)


def cudaDeviceGetAttribute(attribute: int, device: int) -> tuple[Any, ...]:
    return _told(runtime.deviceGetAttribute, int(attribute), device)


def cudaMalloc(size: int) -> tuple[Any, ...]:
    return _told(runtime.malloc, size)


def cudaFree(pointer: int) -> tuple[Any, ...]:
    return _told_until_the_end(runtime.free, pointer)


def cudaIpcGetMemHandle(pointer: int) -> tuple[Any, ...]:
    return _told(lambda: cudaIpcMemHandle_t(runtime.ipcGetMemHandle(pointer)))


def cudaMemcpyAsync(to: Any, source: Any, count: int, kind: int, stream: int) -> tuple[Any, ...]:
    return _told(runtime.memcpyAsync, _address(to), _address(source), count, int(kind), int(stream))


def cudaStreamCreate() -> tuple[Any, ...]:
    return _told(lambda: cudaStream_t(runtime.streamCreate()))


def cudaStreamSynchronize(stream: int) -> tuple[Any, ...]:
    return _told(runtime.streamSynchronize, int(stream))


def cudaStreamDestroy(stream: int) -> tuple[Any, ...]:
    return _told_until_the_end(runtime.streamDestroy, int(stream))


def _address(memory: Any) -> int:
    if isinstance(memory, int):
        return memory
    if isinstance(memory, bytes):
        return ctypes.cast(ctypes.c_char_p(memory), ctypes.c_void_p).value or 0
    return ctypes.addressof(memory)
