"""Shared weights on a device: memory that all processes map, or copies for this process if the device cannot
share its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from gpuserve_worker.inference.failure import DeviceFailure
from gpuserve_worker.memory import device_copies
from gpuserve_worker.memory.device_copies import DeviceSpace
from gpuserve_worker.memory.device_pickles import DevicePickle, rebuild
from gpuserve_worker.memory.sealed_pickles import NoSharedMemory, seal_pickles
from gpuserve_worker.memory.weights_port import SealedObject, WeightsPort
from gpuserve_worker.protocol.sealed_memory import split


class MappedWeights:
    """Weights in memory of a device that all processes map. ``host`` is their copy on the host, if the model
    may sleep. The addresses stay the same while the model sleeps.
    """

    def __init__(
        self, port: WeightsPort, space: DeviceSpace, device: str, key: str, host: SealedObject | None
    ) -> None:
        self._port = port
        self._space = space
        self._device = device
        self._key = f"{key}\n{space.uuid}"
        self._host = host
        self._address = self._nbytes = 0
        self._holders: weakref.WeakSet[_DeviceBytes] = weakref.WeakSet()

    def open(self, load: Callable[[], Any]) -> Any:
        """Return what ``load`` returned in the first process, over the memory. Raise whatever ``load`` and
        the pickling of its result raise, or the device's errors.
        """
        import torch

        shared = self._map(load if self._host is None else partial(self._host.open, writable=True))

        def storage_at(offset: int, nbytes: int) -> Any:
            if not nbytes:
                return torch.UntypedStorage(0, device=self._device)
            held = _DeviceBytes(self._address + offset, nbytes)
            self._holders.add(held)
            return torch.as_tensor(held, device=self._device).untyped_storage()

        data, *buffers = split(shared.memory.map_private(), shared.ranges)
        opened = rebuild(data, [one.toreadonly() for one in buffers], storage_at)
        if self._host is not None:
            device_copies.remember(self)
        return opened

    @property
    def is_used(self) -> bool:
        return bool(self._holders)

    def drop(self) -> None:
        self._space.unmap(self._address, self._nbytes)
        if not self.is_used:
            self._space.free(self._address, self._nbytes)
        self._port.release(self._key)

    def restore(self) -> None:
        assert self._host is not None, "a model that sleeps has a copy on the host"
        self._map(partial(self._host.open, writable=True))

    def _map(self, load: Callable[[], Any]) -> SealedObject:
        """Map the memory that the supervisor has; lay it anew if this process is to load it."""
        shared = self._port.request(self._key)
        if shared is None:
            try:
                shared = self._lay(DevicePickle(load()))
            except BaseException:
                with suppress(OSError):
                    self._port.publish(self._key, None)
                raise
            self._port.publish(self._key, shared)
        else:
            assert shared.device is not None, "the key is that of memory of a device"
            try:
                self._address = self._space.map(shared.device, self._address)
            except DeviceFailure as error:
                if not error.is_out_of_memory:
                    self._port.publish(self._key, None)  # so that the next process loads again
                raise
            self._nbytes = shared.device.nbytes
        return shared

    def _lay(self, pickled: DevicePickle) -> SealedObject:
        try:
            memory, (ranges,) = seal_pickles([pickled])
        except NoSharedMemory as error:
            raise MemoryError(str(error)) from None
        self._address, device = self._space.lay(tuple(pickled.sources), pickled.device_nbytes, self._address)
        self._nbytes = device.nbytes
        return SealedObject(memory, ranges, device)


class _DeviceBytes:
    """Bytes at an address of a device, for libraries that know ``__cuda_array_interface__``."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


# ---- copies of this process ------------------------------------------------


class _Copy:
    """A tensor on the host with the bytes of a storage, and its copy on a device."""

    is_used = True  # torch frees the memory of an unused copy

    def __init__(self, source: Any, copy: Any) -> None:
        self._source = source
        self._copy = copy

    def drop(self) -> None:
        self._copy.untyped_storage().resize_(0)

    def restore(self) -> None:
        self._copy.untyped_storage().resize_(self._source.nbytes)
        self._copy.copy_(self._source)


def on_device(value: Any, device: str, *, remember: bool) -> Any:
    """Return an object with copies of its torch tensors on a device; ``remember`` the copies for ``drop`` and
    ``restore``. Raise ``TypeError`` if the object has no tensor.
    """
    import torch

    pickled = DevicePickle(value)
    sources = {one.offset: one.storage for one in pickled.sources}

    def storage_at(offset: int, nbytes: int) -> Any:
        if not nbytes:
            return torch.UntypedStorage(0, device=device)
        source = torch.empty(0, dtype=torch.uint8, device=sources[offset].device).set_(sources[offset])
        copy = source.to(device, copy=True)
        if remember:
            device_copies.remember(_Copy(source, copy))
        return copy.untyped_storage()

    return rebuild(pickled.data, pickled.buffers, storage_at)
