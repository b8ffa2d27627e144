"""Shared memory of the load generator that the server reads and writes: made, filled, registered, given up.

tritonclient makes the memory. A region belongs to ``Regions``, which gives it up at the end of its block.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Protocol

from gpuserve.bench.control import Control
from gpuserve.bench.errors import BenchError
from gpuserve.bench.plan import SharedMemory

_PATIENCE_S: Final = 5.0
_RETRY_S: Final = 0.02
_CUDA_DEVICE: Final = 0


class _Memory(Protocol):
    """How one kind of memory is made. The handle is tritonclient's."""

    def create(self, name: str, nbytes: int) -> Any:
        """Memory of this size."""

    def fill(self, handle: Any, content: bytes) -> None:
        """Write to its start."""

    def register(self, control: Control, name: str, handle: Any, nbytes: int) -> None:
        """Let the server know it."""

    def destroy(self, handle: Any) -> None:
        """Give it up."""


class _SystemMemory:
    def __init__(self) -> None:
        from tritonclient.utils import shared_memory

        self._library = shared_memory

    def create(self, name: str, nbytes: int) -> Any:
        return self._library.create_shared_memory_region(name, f"/{name}", nbytes)

    def fill(self, handle: Any, content: bytes) -> None:
        self._library.set_shared_memory_region(handle, [_as_array(content)])

    def register(self, control: Control, name: str, handle: Any, nbytes: int) -> None:
        control.register_system(name, f"/{name}", nbytes)

    def destroy(self, handle: Any) -> None:
        self._library.destroy_shared_memory_region(handle)


class _CudaMemory:
    def __init__(self) -> None:
        try:
            from tritonclient.utils import cuda_shared_memory
        except Exception as error:  # bindings that are missing, or do not fit the driver: each raises its own
            raise BenchError(
                "--shared-memory cuda needs a GPU and the packages of tritonclient[cuda]: "
                f"{type(error).__name__}: {error}"
            ) from None
        self._library = cuda_shared_memory

    def create(self, name: str, nbytes: int) -> Any:
        return self._library.create_shared_memory_region(name, nbytes, _CUDA_DEVICE)

    def fill(self, handle: Any, content: bytes) -> None:
        self._library.set_shared_memory_region(handle, [_as_array(content)])

    def register(self, control: Control, name: str, handle: Any, nbytes: int) -> None:
        import base64

        raw = base64.b64decode(self._library.get_raw_handle(handle))
        control.register_cuda(name, raw, _CUDA_DEVICE, nbytes)

    def destroy(self, handle: Any) -> None:
        self._library.destroy_shared_memory_region(handle)


class Regions:
    """Regions of one run; use as a context manager."""

    def __init__(self, kind: SharedMemory, control: Control) -> None:
        self._is_cuda = kind is SharedMemory.CUDA
        self._control = control
        self._memory: _Memory = _CudaMemory() if self._is_cuda else _SystemMemory()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Regions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, role: str, nbytes: int, content: bytes = b"") -> str:
        """A region of this size that the server knows; returns its name.

        Raises:
            BenchError: there is not so much memory, or the server refuses.
        """
        name = f"gpuserve-bench-{os.getpid()}-{role}"
        self._stack.enter_context(self._region(name, max(nbytes, 1), content))
        return name

    @contextlib.contextmanager
    def _region(self, name: str, nbytes: int, content: bytes) -> Iterator[None]:
        try:
            handle = self._memory.create(name, nbytes)
        except Exception as error:  # tritonclient has a class of its own for each kind of memory
            raise BenchError(f"{nbytes} bytes of shared memory cannot be made: {error}") from None
        try:
            if content:
                self._memory.fill(handle, content)
            self._memory.register(self._control, name, handle, nbytes)
            try:
                yield
            finally:
                self._unregister(name)
        finally:
            self._memory.destroy(handle)

    def _unregister(self, name: str) -> None:
        """A server may answer a moment before it lets go of a region, and refuse until then."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._control.unregister(name, cuda=self._is_cuda)
                return
            except BenchError:
                if time.monotonic() > deadline:
                    return
                time.sleep(_RETRY_S)


def _as_array(content: bytes) -> Any:
    import numpy as np

    return np.frombuffer(content, np.uint8)
