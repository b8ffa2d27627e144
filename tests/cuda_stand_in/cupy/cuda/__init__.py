"""The stand-in for ``cupy.cuda``."""

from cupy.cuda import runtime
from cupy.cuda.device import Device, get_device_id
from cupy.cuda.memory import (
    BaseMemory,
    Memory,
    MemoryAsync,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
    get_allocator,
    malloc_async,
    set_allocator,
    using_allocator,
)
from cupy.cuda.pinned_memory import PinnedMemory, PinnedMemoryPointer, PinnedMemoryPool, alloc_pinned_memory
from cupy.cuda.stream import Event, ExternalStream, Stream, get_current_stream, get_elapsed_time


def is_available() -> bool:
    """Whether there is a device."""
    try:
        return runtime.getDeviceCount() > 0
    except runtime.CUDARuntimeError:
        return False


__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "Memory",
    "MemoryAsync",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "PinnedMemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "get_allocator",
    "get_current_stream",
    "get_device_id",
    "get_elapsed_time",
    "is_available",
    "malloc_async",
    "runtime",
    "set_allocator",
    "using_allocator",
]
