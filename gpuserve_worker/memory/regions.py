"""The regions of shared memory that clients registered, as a worker sees them: mapped when first used, read
and written in place. A region's file is the client's, who may write to it or shrink it at any time: that may
spoil what it asked for, and nothing else. A borrower: who registers, and who may, is the front's business.
Regions of device memory are opened by the worker's device path, which is a ``DeviceRegionOpener``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn, Protocol

import numpy as np

from gpuserve_worker.memory.arena import PageLocks
from gpuserve_worker.memory.copying import copy_bytes
from gpuserve_worker.memory.shrink_guard import GUARD, MappingWatch
from gpuserve_worker.protocol.payloads import Place

_NO_DEVICE: Final = (
    "the server has no cupy that can use this device, which it needs to open device memory: expected "
    "gpuserve[cuda12] or gpuserve[cuda13] installed"
)
NOT_THERE: Final = "a region of CUDA memory is not there"
#: Where a file can be mapped from.
_GRANULARITY: Final = mmap.ALLOCATIONGRANULARITY


class RegionError(Exception):
    """A client's region is not what it was registered as. The text is one sentence for the client, who is
    told ``code``, a name of ``errors.Code``.
    """

    code = "INVALID_ARGUMENT"


class RegionMemory(Protocol):
    """What can be done with a region of either kind; each raises ``RegionError`` where it cannot be."""

    def read(self, place: Place, target: memoryview) -> None:
        """Copy the bytes of a place to host memory of as many."""

    def begin_read(self, place: Place, target: memoryview) -> bool:
        """As ``read``. True: the bytes are there only after ``end_reads``, which many reads may share."""

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        """Have the bytes of a place put there by ``put``."""

    def check(self, place: Place) -> None:
        """Do nothing where the place is still there, and was while it was in use."""

    def close(self) -> None: ...


class DeviceRegionOpener(Protocol):
    def open_region(self, nbytes: int, raw_handle: bytes, told: Callable[[str], None]) -> RegionMemory:
        """The region of ``nbytes`` behind a handle of another process, which is opened elsewhere. ``told``
        is called, in any thread, once it can be used, or with the reason why it cannot be; whoever uses it
        before waits for that.
        """

    def end_reads(self) -> None:
        """Wait for all reads that were begun; raises ``RegionError`` where one could not be made."""


class RegionLocks(PageLocks, Protocol):
    """Who locks pages for a device, those of clients up to a limit."""

    def lock_lent(self, memory: memoryview) -> bool:
        """Have a client's memory locked soon; False where that would be more than the limit."""

    def is_locked(self, memory: memoryview) -> bool: ...


def check_inside(place: Place, nbytes: int) -> None:
    """Do nothing where a place lies in a region of ``nbytes``. Raises ``ValueError`` where it does not."""
    if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > nbytes:
        raise ValueError(f"no {place.nbytes} bytes at {place.offset} of region {place.region}")


class SystemRegion:
    """One region: a part of a file in shared memory. ``close()`` leaves it to the last array over it. Its
    pages are locked where there are ``locks``, all of it is there, and the device has used it before.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, locks: RegionLocks | None = None) -> None:
        self._fd = os.dup(fd)
        self._start = offset
        self._nbytes = nbytes
        self._view: memoryview | None = None
        self._watch: MappingWatch | None = None
        self._locks = locks
        #: The whole mapping, once it is to be locked.
        self._pages: memoryview | None = None
        self._device_uses = 0

    def view(self, place: Place) -> memoryview:
        check_inside(place, self._nbytes)
        self.check(place)
        try:
            view = self._mapped()
        except (ValueError, OSError):  # it has been shrunk since the check
            raise self._shrunk(place) from None
        return view[place.offset : place.offset + place.nbytes]

    def read(self, place: Place, target: memoryview) -> None:
        copy_bytes(target, self.view(place))
        self.check(place)

    def begin_read(self, place: Place, target: memoryview) -> bool:
        self.read(place, target)
        return False

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        put(self.view(place))
        self.check(place)

    def check(self, place: Place) -> None:
        whole = self._watch is None or not self._watch.broken
        # Where its end is, at a quarter of the cost of ``fstat``. The file position is nobody's here.
        if whole and os.lseek(self._fd, 0, os.SEEK_END) >= self._start + place.offset + place.nbytes:
            return
        raise self._shrunk(place)

    def _shrunk(self, place: Place) -> RegionError:
        return RegionError(
            "a region of shared memory that the request names has shrunk since it was registered, or there "
            f"is no memory behind it: expected {place.nbytes} bytes at offset {place.offset} of it"
        )

    def is_locked(self) -> bool:
        """Whether the device can copy from and to it by itself; to be asked before each such copy. What is
        more than a claim is locked for later ones: to lock memory that is not there would be to fill it.
        """
        if self._locks is None:
            return False
        if self._pages is not None:
            return self._locks.is_locked(self._pages)
        self._device_uses += 1
        # A look at a large one takes a while: after 1, 2, 4, 8, … uses.
        if not self._device_uses & (self._device_uses - 1) and self._is_there():
            self._lock_pages(self._locks)
        return False

    def close(self) -> None:
        """Let go of the file, and of its mapping unless an array is over it."""
        os.close(self._fd)
        if self._locks is not None and self._pages is not None:
            self._locks.unlock(self._pages)
        self._view = self._pages = None

    def _is_there(self) -> bool:
        """Whether all of it has been written to."""
        try:
            return os.lseek(self._fd, self._start, os.SEEK_HOLE) >= self._start + self._nbytes
        except OSError:  # its end is before it begins
            return False

    def _lock_pages(self, locks: RegionLocks) -> None:
        if self._start % _GRANULARITY:
            return
        with suppress(ValueError, OSError):  # it has been shrunk
            pages = self._mapped()
            if locks.lock_lent(pages):
                self._pages = pages

    def _mapped(self) -> memoryview:
        if self._view is None:
            # A file is mapped from a page on; what of the page is before the region is not looked at.
            before = self._start % _GRANULARITY
            mapped = mmap.mmap(self._fd, before + self._nbytes, offset=self._start - before)
            whole = np.frombuffer(mapped, np.uint8)
            self._watch = GUARD.watch(whole)
            self._view = whole.data[before:]
        GUARD.stand_by()
        return self._view


class _NoRegion:
    """A region that could not be opened. ``problem`` is what every use of it is told."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def _refuse(self, place: Place, *_: object) -> NoReturn:
        raise RegionError(self._problem)

    read = begin_read = write = check = _refuse

    def close(self) -> None:
        pass


class ClientRegions:
    """Every region that the front has told this worker of, by number."""

    def __init__(self, locks: RegionLocks | None = None) -> None:
        self._locks = locks
        self._regions: dict[int, RegionMemory] = {}
        self._opener: DeviceRegionOpener | None = None

    def __len__(self) -> int:
        return len(self._regions)

    def attach(self, number: int, fd: int, offset: int, nbytes: int) -> None:
        """Know a region of system memory that a client registered; ``fd`` stays the caller's."""
        self._regions[number] = SystemRegion(fd, offset, nbytes, self._locks)

    def attach_on_device(
        self,
        number: int,
        nbytes: int,
        raw_handle: bytes,
        opener: DeviceRegionOpener | None,
        told: Callable[[str], None],
    ) -> None:
        """Know a region of memory of the worker's device. ``told``: see ``DeviceRegionOpener``."""
        if opener is None:
            self._regions[number] = _NoRegion(f"{NOT_THERE}: {_NO_DEVICE}")
            told(_NO_DEVICE)
        else:
            self._opener = opener
            self._regions[number] = opener.open_region(nbytes, raw_handle, told)

    def get(self, number: int) -> RegionMemory | None:
        return self._regions.get(number)

    def detach(self, number: int) -> None:
        self._regions.pop(number).close()

    def view(self, place: Place) -> memoryview:
        """The bytes of a place in system memory; raises as ``SystemRegion.view``, or ``KeyError``."""
        region = self._regions[place.region]
        if not isinstance(region, SystemRegion):
            raise ValueError(f"region {place.region} is not of system memory")
        return region.view(place)

    def is_locked(self, number: int) -> bool:
        """Whether a region is of system memory that the device can copy from and to by itself."""
        region = self._regions.get(number)
        return isinstance(region, SystemRegion) and region.is_locked()

    def __getitem__(self, number: int) -> RegionMemory:
        return self._regions[number]

    def end_reads(self) -> None:
        if self._opener is not None:
            self._opener.end_reads()

    def check(self, place: Place) -> None:
        """To be called after a view was used; nobody cares for a region that has gone with its front."""
        region = self._regions.get(place.region)
        if region is not None:
            region.check(place)

    def close(self) -> None:
        for number in list(self._regions):
            self.detach(number)
