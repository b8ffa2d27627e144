"""The port of a worker to the weights that its supervisor holds, and an object in sealed memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from gpuserve_worker.protocol.sealed_memory import ExportedMemory, Ranges, SealedMemory, split


class SealedObject(NamedTuple):
    """An object in sealed memory, and the places of its parts; ``device`` has its tensors, if these are on a
    device.
    """

    memory: SealedMemory
    ranges: Ranges
    device: ExportedMemory | None = None

    def open(self, *, writable: bool) -> Any:
        """Return the object over the mapped memory. Raise whatever its parts raise."""
        data, *buffers = split(self.memory.map_private(), self.ranges)
        return pickle.loads(data, buffers=[one if writable else one.toreadonly() for one in buffers])


class WeightsPort(Protocol):
    """The port of a worker to its supervisor's weights. ``may_sleep``: the model of the worker may sleep."""

    may_sleep: bool

    def request(self, key: str) -> SealedObject | None:
        """Return a key's weights, or None if the caller loads them; wait for a loader. Raise ``OSError``."""

    def publish(self, key: str, weights: SealedObject | None) -> None:
        """Give the supervisor the weights that the caller was to load. None: the load failed."""

    def release(self, key: str) -> None:
        """Tell the supervisor that this process has unmapped the memory of a device, to sleep."""


#: The port of this process, if it is a worker.
PORTS: list[WeightsPort] = []


def open_port(port: WeightsPort) -> None:
    """Share the weights of this process through a port from now on."""
    PORTS[:] = [port]


def load_once(port: WeightsPort, key: str, load: Callable[[], Any]) -> SealedObject:
    """Return the weights of a key in memory of the host; load them if this process is the first."""
    shared = port.request(key)
    if shared is None:
        try:
            shared = seal_object(load())
        except BaseException:
            with suppress(OSError):
                port.publish(key, None)
            raise
        port.publish(key, shared)
    return shared


def seal_object(value: Any) -> SealedObject:
    """Return an object in sealed memory. Raise whatever its parts raise, or ``MemoryError``."""
    from gpuserve_worker.memory.sealed_pickles import NoSharedMemory, PickledObject, seal_pickles

    try:
        memory, (ranges,) = seal_pickles([PickledObject(value)])
    except NoSharedMemory as error:
        raise MemoryError(str(error)) from None
    return SealedObject(memory, ranges)
