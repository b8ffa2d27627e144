"""Shared memory of the load generator that the server reads and writes: made, filled, registered, given up.
tritonclient makes the memory, for the time of a ``with SharedRegions(...)``.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

import numpy as np

from gpuserve.bench.plan.errors import BenchError
from gpuserve.bench.plan.plan import SharedMemory
from gpuserve.bench.server.control import ServerControl

_PATIENCE_S: Final = 5.0
_RETRY_S: Final = 0.02
_CUDA_DEVICE: Final = 0


class SharedRegions:
    """The regions of one run, as a context manager; BenchError: no GPU, or packages are missing."""

    def __init__(self, kind: SharedMemory, control: ServerControl) -> None:
        self._is_cuda = kind is SharedMemory.CUDA
        self._control = control
        self._library = _library(self._is_cuda)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SharedRegions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, role: str, nbytes: int, content: bytes = b"") -> str:
        """Make a region, register it, and return its name; BenchError: no memory, or the server refuses."""
        name = f"gpuserve-bench-{os.getpid()}-{role}"
        self._stack.enter_context(self._region(name, max(nbytes, 1), content))
        return name

    @contextlib.contextmanager
    def _region(self, name: str, nbytes: int, content: bytes) -> Iterator[None]:
        try:
            handle = self._create(name, nbytes)
        except Exception as error:  # tritonclient has a class of its own for each kind of memory
            raise BenchError(f"{nbytes} bytes of shared memory cannot be made: {error}") from None
        try:
            if content:
                self._library.set_shared_memory_region(handle, [np.frombuffer(content, np.uint8)])
            self._register(name, handle, nbytes)
            try:
                yield
            finally:
                self._unregister(name)
        finally:
            self._library.destroy_shared_memory_region(handle)

    def _create(self, name: str, nbytes: int) -> Any:
        if self._is_cuda:
            return self._library.create_shared_memory_region(name, nbytes, _CUDA_DEVICE)
        return self._library.create_shared_memory_region(name, f"/{name}", nbytes)

    def _register(self, name: str, handle: Any, nbytes: int) -> None:
        if self._is_cuda:
            raw = base64.b64decode(self._library.get_raw_handle(handle))
            self._control.register_cuda(name, raw, _CUDA_DEVICE, nbytes)
        else:
            self._control.register_system(name, f"/{name}", nbytes)

    def _unregister(self, name: str) -> None:
        """Try for some time: a server may refuse until it has let go of the region, after its last answer."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._control.unregister(name, cuda=self._is_cuda)
                return
            except BenchError:
                if time.monotonic() > deadline:
                    return
                time.sleep(_RETRY_S)


def _library(is_cuda: bool) -> Any:
    """The module of tritonclient that makes this kind of memory."""
    if not is_cuda:
        from tritonclient.utils import shared_memory

        return shared_memory
    try:
        from tritonclient.utils import cuda_shared_memory
    except Exception as error:  # bindings that are missing, or do not fit the driver: each raises its own
        raise BenchError(
            "--shared-memory cuda needs a GPU and the packages of tritonclient[cuda]: "
            f"{type(error).__name__}: {error}"
        ) from None
    return cuda_shared_memory
