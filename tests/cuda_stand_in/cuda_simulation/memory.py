"""Device memory. A block of it is a file, which other processes can open; its address is in a range where a
process has no memory, so that no code on the host can use it by mistake. What is new is full of ``POISON``.
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
from cuda_simulation.blocks import BLOCK_NBYTES, Layout, rounded
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.machine import HELD, MEMORY, is_held
from cuda_simulation.visible import Device

#: What memory has that nobody has written to: numbers that are none, and no zeros.
POISON: Final = 0xFF
#: Larger memory has it at both ends and on some pages between: files of gigabytes are to stay empty.
_WHOLE_NBYTES: Final = 4 << 20
_END_NBYTES: Final = 64 << 10
_STEPS: Final = 64
#: No address of a process has these bits on x86-64.
_BASE: Final = 0x00D0_0000_0000_0000
#: What a process gets is nowhere what another gets: an address that crossed a process is an error.
_OF_PROCESS: Final = 1 << 34
_GAP: Final = BLOCK_NBYTES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Origin(Enum):
    """Where an allocation is from."""

    MALLOC = auto()
    #: ``mallocAsync``: from CUDA's own pool, which cannot be exported.
    POOL = auto()
    #: Of another process.
    IMPORTED = auto()


@dataclass(frozen=True, eq=False)
class Block:
    """Memory of a device with a file of its own, of which ``name`` is the name; it lies at ``address``."""

    address: int
    device: Device
    origin: Origin
    name: owners.OwnedName
    content: Bytes
    layout: Layout


@dataclass(frozen=True, eq=False)
class Allocation:
    """``nbytes`` of device memory at ``address``, in a block that may have others in it."""

    address: int
    nbytes: int
    block: Block

    @property
    def device(self) -> Device:
        return self.block.device

    @property
    def origin(self) -> Origin:
        return self.block.origin

    @property
    def end(self) -> int:
        """The first address behind it; up to there nobody notices who goes too far."""
        return self.address + rounded(self.nbytes)

    @property
    def offset(self) -> int:
        """Where it begins in its block."""
        return self.address - self.block.address

    def part(self, address: int, nbytes: int) -> Bytes:
        """The bytes of a range inside."""
        start = address - self.block.address
        return self.block.content[start : start + nbytes]


class MemoryFiles:
    """The files of all processes' allocations, one folder for each device."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / MEMORY

    def create(self, device: Device, nbytes: int, foreign: int) -> tuple[owners.OwnedName, Bytes]:
        """Raises CUDARuntimeError: the device has no ``nbytes`` left, with ``foreign`` bytes of others."""
        folder, name = self._folder(device.uuid), owners.new_name()
        with self._locked():
            self._check_room(device, nbytes, foreign)
            with (folder / str(name)).open("w+b") as file:
                file.truncate(nbytes)
                return name, poisoned(_mapped(file.fileno(), nbytes))

    def reserve(self, device: Device, nbytes: int, foreign: int) -> None:
        """What a process has of a device by using it. Raises CUDARuntimeError as ``create``."""
        path = self._folder(device.uuid) / str(owners.new_name())
        with self._locked():
            self._check_room(device, nbytes, foreign)
            with path.open("wb") as file:
                file.truncate(nbytes)

    def create_held(self, device: Device, nbytes: int, foreign: int) -> int:
        """A descriptor of memory that exists while a descriptor or a mapping of it does: the lock of the file
        is that of the open file, which all of these are of. Raises CUDARuntimeError as ``create``.
        """
        path = self._folder(device.uuid) / f"{owners.new_name()}{HELD}"
        with self._locked():
            self._check_room(device, nbytes, foreign)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, nbytes)
        poisoned(_mapped(fd, nbytes))
        return fd

    def device_of_held(self, fd: int) -> str:
        """The UUID of the device of such a descriptor; "" for another one."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            return ""
        is_held = path.name.endswith(HELD) and path.parent.parent == self._directory.resolve()
        return path.parent.name if is_held else ""

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
        """Bytes of each live process; of 0, what others hold of processes that have ended."""
        found: dict[int, int] = {}
        alive = functools.cache(lambda owner: owner.alive)
        for entry in list(os.scandir(self._folder(device))):
            owner = owners.parse(entry.name.removesuffix(HELD)).owner
            if is_held(entry.path) if entry.name.endswith(HELD) else alive(owner):
                pid = owner.pid if alive(owner) else 0
                found[pid] = found.get(pid, 0) + _nbytes(entry)
            else:
                Path(entry.path).unlink(missing_ok=True)
        return found

    def _check_room(self, device: Device, nbytes: int, foreign: int) -> None:
        if self.used(device.uuid) + foreign + nbytes > device.memory:
            raise CUDARuntimeError(errors.MEMORY_ALLOCATION)

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


def poisoned(memory: Bytes) -> Bytes:
    """The same memory, as nobody may read it who has not written to it."""
    if memory.nbytes <= _WHOLE_NBYTES:
        memory[:] = POISON
        return memory
    memory[:_END_NBYTES] = memory[-_END_NBYTES:] = POISON
    for start in range(0, memory.nbytes, memory.nbytes // _STEPS):
        memory[start : start + mmap.PAGESIZE] = POISON
    return memory


def _mapped(fd: int, nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


class AddressTable:
    """The memory of this process by address. Only what is in a block gets an address that another had."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next = _BASE + os.getpid() * _OF_PROCESS
        self._starts: list[int] = []
        self._allocations: dict[int, Allocation] = {}
        #: Addresses of blocks that the device must not write to.
        self.read_only: set[int] = set()

    def block(self, device: Device, origin: Origin, name: owners.OwnedName, content: Bytes) -> Block:
        """A block at a new address, with nothing in it."""
        with self._lock:
            address = self._next
            self._next += rounded(content.nbytes, BLOCK_NBYTES) + _GAP
        return Block(address, device, origin, name, content, Layout(content.nbytes))

    def put(self, allocation: Allocation) -> Allocation:
        """There is one more."""
        with self._lock:
            bisect.insort(self._starts, allocation.address)
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
        return found if address + nbytes <= found.end else None

    def of_content(self, pointer: int) -> int | None:
        """The address of a byte of a block, by where this process has it mapped."""
        with self._lock:
            for one in self._allocations.values():
                offset = pointer - one.block.content.ctypes.data
                if 0 <= offset < one.block.content.nbytes:
                    return one.block.address + offset
        return None


class OwnMemory:
    """What this process has allocated: small ones in blocks that they share, each on one device."""

    def __init__(self, files: MemoryFiles, addresses: AddressTable) -> None:
        self._files = files
        self._addresses = addresses
        self._lock = threading.RLock()
        self._shared: list[Block] = []

    def allocate(self, device: Device, nbytes: int, origin: Origin, foreign: int) -> Allocation:
        """Raises CUDARuntimeError: the device has not so much left, with ``foreign`` bytes of others."""
        with self._lock:
            if nbytes < BLOCK_NBYTES:
                for block in self._shared:
                    if (block.device, block.origin) == (device, origin):
                        offset = block.layout.take(nbytes)
                        if offset is not None:
                            return self._addresses.put(Allocation(block.address + offset, nbytes, block))
            block = self._new(device, nbytes, origin, foreign)
            offset = block.layout.take(nbytes)
            assert offset is not None, "a new block has room for what it was made for"
            return self._addresses.put(Allocation(block.address + offset, nbytes, block))

    def release(self, allocation: Allocation) -> None:
        """It is gone; its bytes are as long as others are in its block, whoever has that open."""
        block = allocation.block
        with self._lock:
            self._addresses.remove(allocation)
            block.layout.give_back(allocation.offset)
            if not block.layout.is_empty:
                return
            if block in self._shared:
                self._shared.remove(block)
            self._files.remove(block.device.uuid, block.name)

    def _new(self, device: Device, nbytes: int, origin: Origin, foreign: int) -> Block:
        name, content = self._files.create(device, rounded(nbytes, BLOCK_NBYTES), foreign)
        block = self._addresses.block(device, origin, name, content)
        if nbytes < BLOCK_NBYTES:
            self._shared.append(block)
        return block


def is_device_address(address: int) -> bool:
    """Whether an address is in the range of device memory, of any process, allocated or not."""
    return address >= _BASE
