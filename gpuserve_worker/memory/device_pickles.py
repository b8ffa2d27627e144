"""Pickles of objects whose torch tensors come to lie in memory of a device: a pickle names the place of each
storage in that memory. So tied weights stay tied, and views stay views.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpuserve_worker.memory.device_copies import Source
from gpuserve_worker.memory.sealed_pickles import PickledObject, SealedPickler, typed_storage
from gpuserve_worker.protocol.sealed_memory import Buffer

#: Storages start at multiples of this, as CUDA's own allocations do.
_ALIGNMENT_NBYTES: Final = 512


class _DevicePickler(SealedPickler):
    """A pickler that leaves out torch's storages, wherever they are, and lists them in ``sources``."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.sources: dict[tuple[int, int], Source] = {}
        self.end = 0

    def persistent_id(self, value: Any) -> tuple[int, int] | None:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.UntypedStorage) or value.device.type == "meta":
            return None
        address, nbytes = value.data_ptr(), value.nbytes()
        if not nbytes:
            return 0, 0
        key = address, nbytes
        if key not in self.sources:
            self.sources[key] = Source(self.end, nbytes, address, value.device.type != "cpu", value)
            self.end += -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        return self.sources[key].offset, nbytes

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.TypedStorage):
            return typed_storage, (value._untyped_storage, value.dtype)
        return super().reducer_override(value)


class DevicePickle(PickledObject):
    """A pickle, its buffers on the host, the ``sources`` of its tensors, and the size of their memory."""

    def __init__(self, value: Any) -> None:
        """Pickle ``value``. Raise whatever its objects raise, or ``TypeError`` if it has no tensors."""
        pickler = self._pickle(value, _DevicePickler)
        self.sources: Sequence[Source] = tuple(pickler.sources.values())
        self.device_nbytes: int = pickler.end
        if not self.sources:
            raise TypeError("device of shared_weights needs torch tensors, and load returned none")


class _DeviceUnpickler(pickle.Unpickler):
    """An unpickler that asks ``storage_at(offset, nbytes)`` once for each storage."""

    def __init__(
        self, data: Buffer, buffers: Sequence[memoryview], storage_at: Callable[[int, int], Any]
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._storage_at = storage_at
        self._storages: dict[tuple[int, int], Any] = {}

    def persistent_load(self, place: tuple[int, int]) -> Any:
        if place not in self._storages:
            self._storages[place] = self._storage_at(*place)
        return self._storages[place]


def rebuild(data: Buffer, buffers: Sequence[memoryview], storage_at: Callable[[int, int], Any]) -> Any:
    """Return a pickled object over storages of ``storage_at(offset, nbytes)``."""
    return _DeviceUnpickler(data, buffers, storage_at).load()
