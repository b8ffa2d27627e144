"""The stand-in for ``cupy.cuda.memory``: owners of device memory, pointers into it, and the pool."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from cupy.cuda import runtime
from cupy.cuda._chunks import Chunk, Chunks
from cupy.cuda.device import Device
from cupy.cuda.stream import get_current_stream

#: cupy rounds what it takes from its pool to this.
_UNIT: Final = 512
_OUT_OF_MEMORY: Final = 2


class OutOfMemoryError(MemoryError):
    """The device, or the limit of the pool, has not so much memory left."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        tail = f", limit set to: {limit:,} bytes" if limit else ""
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{tail})."
        )


class BaseMemory:
    """Device memory of ``size`` bytes at ``ptr``."""

    ptr: int = 0
    size: int = 0
    device_id: int = 0

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class Memory(BaseMemory):
    """Memory of its own, freed with the object."""

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, runtime.getDevice()
        self.ptr = runtime.malloc(size) if size else 0

    def __del__(self) -> None:
        if self.ptr and _quietly is not None:  # it is None when the interpreter ends
            _quietly(lambda: runtime.free(self.ptr))


class MemoryAsync(BaseMemory):
    """Memory from CUDA's own pool, in the order of a stream."""

    def __init__(self, size: int, stream: Any) -> None:
        self.size, self.device_id, self._stream = size, runtime.getDevice(), stream
        self.ptr = runtime.mallocAsync(size, stream.ptr) if size else 0

    def __del__(self) -> None:
        if self.ptr and _quietly is not None:  # as above
            _quietly(lambda: runtime.freeAsync(self.ptr, self._stream.ptr))


class UnownedMemory(BaseMemory):
    """Memory of somebody else, which ``owner`` keeps."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner = int(ptr), int(size), owner
        self.device_id = runtime.pointerGetAttributes(self.ptr).device if device_id < 0 else device_id


class MemoryPointer:
    """A place in device memory, which it keeps."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    @property
    def device(self) -> Device:
        return self.mem.device

    @property
    def device_id(self) -> int:
        return self.mem.device_id

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        runtime.memcpyAsync(self.ptr, _address(mem), size, runtime.memcpyHostToDevice, _stream_ptr(stream))

    def copy_to_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        runtime.memcpyAsync(_address(mem), self.ptr, size, runtime.memcpyDeviceToHost, _stream_ptr(stream))

    def memset(self, value: int, size: int) -> None:
        runtime.memset(self.ptr, value, size)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        runtime.memsetAsync(self.ptr, value, size, _stream_ptr(stream))


class PooledMemory(BaseMemory):
    """What a pool lends; it goes back to the pool with the object, while work on it may still be queued: the
    pool gives it again to the same stream only.
    """

    def __init__(self, pool: MemoryPool, chunk: Chunk) -> None:
        self._pool, self._chunk = pool, chunk
        self.ptr, self.size = chunk.memory.ptr + chunk.offset, chunk.size
        self.device_id = chunk.memory.device_id

    def __del__(self) -> None:
        self._pool._returned.append(self._chunk)  # no lock: this may be in the middle of any line


class MemoryPool:
    """Keeps freed memory for what is asked for next, per device and stream."""

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._allocator = allocator or _from_device
        self._lock = threading.RLock()
        self._returned: deque[Chunk] = deque()
        self._free = Chunks()
        self._used = 0
        self._limit = 0

    def malloc(self, size: int) -> MemoryPointer:
        if not size:
            return MemoryPointer(Memory(0), 0)
        rounded = -(-size // _UNIT) * _UNIT
        arena = (runtime.getDevice(), get_current_stream().ptr)
        with self._lock:
            self._sort_in()
            chunk = self._free.take(rounded, arena)
        chunk = chunk or Chunk(self._new(rounded), 0, rounded, arena)
        with self._lock:
            self._used += chunk.size
        return MemoryPointer(PooledMemory(self, chunk), 0)

    def _sort_in(self) -> None:
        while self._returned:
            chunk = self._returned.popleft()
            self._used -= chunk.size
            self._free.give_back(chunk)

    def set_limit(self, size: int | None = None) -> None:
        self._limit = size or 0

    def free_all_blocks(self, stream: Any = None) -> None:
        with self._lock:
            self._sort_in()
            dropped = self._free.drop_whole(None if stream is None else stream.ptr)
        del dropped

    def free_bytes(self) -> int:
        with self._lock:
            self._sort_in()
            return self._free.nbytes

    def used_bytes(self) -> int:
        with self._lock:
            self._sort_in()
            return self._used

    def total_bytes(self) -> int:
        return self.used_bytes() + self.free_bytes()

    def n_free_blocks(self) -> int:
        with self._lock:
            self._sort_in()
            return len(self._free)

    def _new(self, size: int) -> BaseMemory:
        """Memory from the device; once more after all that is kept was given back, and once more after a
        collection, as cupy does.
        """
        for again in (self.free_all_blocks, gc.collect, self.free_all_blocks, None):
            if not self._limit or self.total_bytes() + size <= self._limit:
                try:
                    return self._allocator(size).mem
                except runtime.CUDARuntimeError as error:
                    if error.status != _OUT_OF_MEMORY:
                        raise
            if again:
                again()
        raise OutOfMemoryError(size, self.total_bytes(), self._limit)


def _from_device(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


def malloc_async(size: int) -> MemoryPointer:
    """The allocator that takes from CUDA's own pool."""
    try:
        return MemoryPointer(MemoryAsync(size, get_current_stream()), 0)
    except runtime.CUDARuntimeError as error:
        if error.status == _OUT_OF_MEMORY:
            raise OutOfMemoryError(size, 0) from None
        raise


class _Current(threading.local):
    allocator: Callable[[int], MemoryPointer] | None = None


default_pool: Final = MemoryPool()
_current: Final = _Current()
_allocator: Callable[[int], MemoryPointer] = default_pool.malloc


def alloc(size: int) -> MemoryPointer:
    """Memory from the current allocator."""
    return get_allocator()(size)


def get_allocator() -> Callable[[int], MemoryPointer]:
    return _current.allocator or _allocator


def set_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> None:
    global _allocator
    _allocator = allocator or _from_device


@contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> Iterator[None]:
    """Have this thread allocate so."""
    before, _current.allocator = _current.allocator, allocator or _from_device
    try:
        yield
    finally:
        _current.allocator = before


def _stream_ptr(stream: Any) -> int:
    return int((stream or get_current_stream()).ptr)


def _address(memory: Any) -> int:
    return int(getattr(memory, "value", None) or memory)


def _quietly(free: Callable[[], None]) -> None:
    """What cannot be freed when its object goes has gone with the device."""
    try:
        free()
    except runtime.CUDARuntimeError:
        pass
