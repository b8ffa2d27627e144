"""The memory of devices that shared weights of this process take. A sleeping model gives it back, and gets it
again from the shared memory on the host, without code of the callable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from gpuserve_worker.protocol.sealed_memory import ExportedMemory


class Source(NamedTuple):
    """The bytes of a torch storage, and their place in the memory of a device."""

    offset: int
    nbytes: int
    address: int
    is_on_device: bool
    storage: Any


class DeviceSpace(Protocol):
    """The memory of one device that processes can share. Its methods raise the device's errors."""

    uuid: str

    def lay(self, sources: tuple[Source, ...], nbytes: int, address: int = 0) -> tuple[int, ExportedMemory]:
        """Copy ``sources`` into new memory; return its address, ``address`` unless that is 0."""

    def map(self, memory: ExportedMemory, address: int = 0) -> int:
        """Map memory at an address, a new one for 0; return the address."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap memory when the device has finished its work. Its addresses stay reserved."""

    def free(self, address: int, nbytes: int) -> None:
        """Give back addresses into which nothing is mapped."""


#: The function that opens the memory of a device by its name, in a process with GPUs. It returns None for a
#: device whose memory cannot be shared.
_OPENERS: Final[list[Callable[[str], DeviceSpace | None]]] = []
_SPACES: Final[dict[str, DeviceSpace | None]] = {}


def offer_spaces(opener: Callable[[str], DeviceSpace | None]) -> None:
    """Share weights on the devices that ``opener`` opens."""
    _OPENERS[:] = [opener]
    _SPACES.clear()


def space_of(device: str) -> DeviceSpace | None:
    """Return the shared memory of a device, or None if each process has a copy of its own there."""
    if device not in _SPACES:
        _SPACES[device] = _OPENERS[0](device) if _OPENERS else None
    return _SPACES[device]


class _Sleeper(Protocol):
    """Memory of a device that is not needed while the model sleeps."""

    @property
    def is_used(self) -> bool:
        """Return whether a tensor uses the memory."""

    def drop(self) -> None:
        """Give the memory back."""

    def restore(self) -> None:
        """Get memory with the same content."""


#: All such memory of this process, which has one model.
_SLEEPERS: Final[list[_Sleeper]] = []


def remember(sleeper: _Sleeper) -> None:
    """Give this memory back while the model sleeps."""
    _SLEEPERS.append(sleeper)


def are_there() -> bool:
    return bool(_SLEEPERS)


def drop() -> None:
    """Give back the memory of all copies. Tensors over them stay, and are not valid until ``restore``."""
    for one in _SLEEPERS:
        one.drop()


def drop_unused() -> None:
    """Give back shared memory without tensors, for a callable with a ``sleep`` of its own."""
    unused = [one for one in _SLEEPERS if not one.is_used]
    for one in unused:
        _SLEEPERS.remove(one)
        one.drop()


def restore() -> None:
    """Fill all copies again. Raise the device's errors."""
    for one in _SLEEPERS:
        one.restore()
