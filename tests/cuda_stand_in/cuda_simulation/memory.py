"""Device memory. An allocation is a file, which other processes can open; its address is in a range where a
process has no memory, so that no code on the host can use it by mistake.
"""

from __future__ import annotations

import bisect
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

import numpy as np

from cuda_simulation import errors, owners
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.visible import Device

#: CUDA aligns what it gives to this.
ALIGNMENT: Final = 512
#: No address of a process has these bits on x86-64.
_BASE: Final = 0x00D0_0000_0000_0000
#: What a process gets is nowhere what another gets: an address that crossed a process is an error.
_OF_PROCESS: Final = 1 << 34
_GAP: Final = 1 << 21

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Origin(Enum):
    """Where an allocation is from."""

    MALLOC = auto()
    #: ``mallocAsync``: from CUDA's own pool, which cannot be exported.
    POOL = auto()
    #: Of another process.
    IMPORTED = auto()


@dataclass(frozen=True, eq=False)
class Allocation:
    """Device memory of ``nbytes`` at ``address``, which lies on ``device``; ``name`` is that of its file."""

    address: int
    nbytes: int
    device: Device
    origin: Origin
    name: owners.OwnedName
    content: Bytes

    def part(self, address: int, nbytes: int) -> Bytes:
        """The bytes of a range inside."""
        start = address - self.address
        return self.content[start : start + nbytes]


class MemoryFiles:
    """The files of all processes' allocations, one folder for each device."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "memory"

    def create(self, device: Device, nbytes: int, foreign: int) -> tuple[owners.OwnedName, Bytes]:
        """Raises CUDARuntimeError: the device has no ``nbytes`` left, with ``foreign`` bytes of others."""
        folder, name = self._folder(device.uuid), owners.new_name()
        with self._locked():
            if self.used(device.uuid) + foreign + nbytes > device.memory:
                raise CUDARuntimeError(errors.MEMORY_ALLOCATION)
            with (folder / str(name)).open("w+b") as file:
                file.truncate(nbytes)
                return name, _mapped(file.fileno(), nbytes)

    def open(self, name: owners.OwnedName) -> tuple[str, Bytes] | None:
        """(device, bytes) of an allocation; None when it is gone, or its process is."""
        for path in self._directory.glob(f"*/{name}") if name.owner.alive else ():
            try:
                with path.open("r+b") as file:
                    return path.parent.name, _mapped(file.fileno(), os.fstat(file.fileno()).st_size)
            except FileNotFoundError:
                continue
        return None

    def remove(self, device: str, name: owners.OwnedName) -> None:
        (self._folder(device) / str(name)).unlink(missing_ok=True)

    def used(self, device: str) -> int:
        """Bytes that live processes have; what dead ones had is given back."""
        return sum(self.of_processes(device).values())

    def of_processes(self, device: str) -> dict[int, int]:
        """Bytes of each live process."""
        found: dict[int, int] = {}
        alive = functools.cache(lambda owner: owner.alive)
        for entry in list(os.scandir(self._folder(device))):
            owner = owners.parse(entry.name).owner
            if alive(owner):
                found[owner.pid] = found.get(owner.pid, 0) + _nbytes(entry)
            else:
                Path(entry.path).unlink(missing_ok=True)
        return found

    def _folder(self, device: str) -> Path:
        folder = self._directory / device
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._directory / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _nbytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


def _mapped(fd: int, nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


class AddressTable:
    """The allocations of this process by address. An address is never given twice."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next = _BASE + os.getpid() * _OF_PROCESS
        self._starts: list[int] = []
        self._allocations: dict[int, Allocation] = {}

    def add(
        self, device: Device, origin: Origin, name: owners.OwnedName, content: Bytes, nbytes: int
    ) -> Allocation:
        with self._lock:
            allocation = Allocation(self._next, nbytes, device, origin, name, content)
            self._next += -(-(nbytes + _GAP) // _GAP) * _GAP
            self._starts.append(allocation.address)
            self._allocations[allocation.address] = allocation
        return allocation

    def remove(self, allocation: Allocation) -> None:
        with self._lock:
            self._starts.remove(allocation.address)
            del self._allocations[allocation.address]

    def at(self, address: int) -> Allocation | None:
        """The allocation that starts there."""
        return self._allocations.get(address)

    def around(self, address: int, nbytes: int = 1) -> Allocation | None:
        """The allocation that has the whole range."""
        with self._lock:
            place = bisect.bisect_right(self._starts, address) - 1
            if place < 0:
                return None
            found = self._allocations[self._starts[place]]
        return found if address + nbytes <= found.address + found.nbytes else None


def is_device_address(address: int) -> bool:
    """Whether an address is in the range of device memory, of any process, allocated or not."""
    return address >= _BASE
