"""Pickles in sealed memory. The buffers of arrays (numpy, torch on the CPU, and all others that support
pickle protocol 5) lie beside the pickle, so every process that loads the object maps one copy of them.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import cloudpickle
import numpy as np

from gpuserve_worker.memory.segments import SPARED_NBYTES, available_nbytes
from gpuserve_worker.protocol.sealed_memory import Ranges, SealedMemory, aligned, seal

#: Smaller buffers stay in the pickle: a page of memory for each would cost more than a copy.
LEAST_NBYTES: Final = 16 << 10


class NoSharedMemory(Exception):
    """The machine has not enough memory for the buffers."""


class SealedPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler that moves large buffers out of the pickle to ``buffers``."""

    def __init__(self, file: Any) -> None:
        self.buffers = buffers = list[memoryview]()

        # No method, because a reference cycle would keep the arrays until the next garbage collection.
        def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < LEAST_NBYTES:
                return True
            buffers.append(view)
            return False

        super().__init__(file, protocol=5, buffer_callback=keep_in_pickle)

    def reducer_override(self, value: Any) -> Any:
        """Pickle torch's storages as arrays; torch would copy them, once for each tensor over them."""
        torch = sys.modules.get("torch")
        if torch is not None:
            # A tensor's state has a TypedStorage, whose public attributes warn that users should not have it.
            if isinstance(value, torch.TypedStorage) and value._untyped_storage.device.type == "cpu":
                return typed_storage, (value._untyped_storage, value.dtype)
            if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu" and value.nbytes():
                return untyped_storage, (torch.empty(0, dtype=torch.uint8).set_(value).numpy(),)
        return super().reducer_override(value)


def untyped_storage(array: Any) -> Any:
    """Return a torch storage over the bytes of an array in mapped memory."""
    import torch  # only pickles of torch's storages call this function

    with warnings.catch_warnings():
        # Memory is mapped copy-on-write, so writing to a read-only array of it is safe.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array).untyped_storage()


def typed_storage(storage: Any, dtype: Any) -> Any:
    """Return a torch storage with a dtype."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class PickledObject:
    """A pickle and its buffers, before they are sealed."""

    def __init__(self, value: Any) -> None:
        """Pickle ``value``. Raise whatever its objects raise."""
        self._pickle(value, SealedPickler)

    def _pickle(self, value: Any, pickler_class: Callable[[Any], Any]) -> Any:
        """Set the pickle and its buffers; return the pickler."""
        file = io.BytesIO()
        pickler = pickler_class(file)
        pickler.dump(value)
        self.data = file.getbuffer()
        self.buffers: list[memoryview] = pickler.buffers
        return pickler

    @property
    def is_small(self) -> bool:
        """Return whether the object fits into a message."""
        return not self.buffers and self.data.nbytes < LEAST_NBYTES


def seal_pickles(objects: Sequence[PickledObject]) -> tuple[SealedMemory, list[Ranges]]:
    """Return sealed objects and their ranges, each buffer once; raise ``NoSharedMemory`` or ``OSError``."""
    parts: list[memoryview] = []
    known: dict[tuple[int, int], tuple[int, int]] = {}
    end = 0

    def place(buffer: memoryview) -> tuple[int, int]:
        nonlocal end
        key = (np.frombuffer(buffer, np.uint8).ctypes.data, buffer.nbytes)
        if key not in known:
            known[key] = (aligned(end), buffer.nbytes)
            end = aligned(end) + buffer.nbytes
            parts.append(buffer)
        return known[key]

    ranges = [tuple([place(buffer) for buffer in (one.data, *one.buffers)]) for one in objects]
    available = available_nbytes()
    if available is not None and available < end + SPARED_NBYTES:
        raise NoSharedMemory(f"{end} bytes are needed, and {available} are available")
    return seal(parts, "gpuserve-weights"), ranges
