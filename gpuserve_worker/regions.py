"""The regions of shared memory that clients registered, as a worker sees them: mapped when first used, read
and written in place. A region's file is the client's, who may write to it or shrink it at any time: that
may spoil what it asked for, and nothing else.

A borrower: who registers, and who may, is the front's business. Device memory is in
``cuda/client_regions.py``, which only a worker with a device ever imports.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from gpuserve_worker.copying import copy_bytes
from gpuserve_worker.payloads import Place
from gpuserve_worker.shrink_guard import GUARD, Watch

if TYPE_CHECKING:
    from gpuserve_worker.cuda.client_regions import ClientRegion, OpenMemories
    from gpuserve_worker.cuda.device import Device

_NO_DEVICE: Final = (
    "the server has no cupy that can use this device, which it needs to open device memory: expected "
    "gpuserve[cuda12] or gpuserve[cuda13] installed"
)
#: Where a file can be mapped from.
_GRANULARITY: Final = mmap.ALLOCATIONGRANULARITY


class RegionError(Exception):
    """A client's region is not what it was registered as. The text is one sentence for the client.

    ``code`` is the name of the ``errors.Code`` that the client is told.
    """

    code = "INVALID_ARGUMENT"


class _Region(Protocol):
    """What can be done with a region of either kind."""

    def read(self, place: Place, target: memoryview) -> None: ...

    def begin_read(self, place: Place, target: memoryview) -> bool: ...

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None: ...

    def check(self, place: Place) -> None: ...

    def close(self) -> None: ...


def check_inside(place: Place, nbytes: int) -> None:
    """Do nothing where a place lies in a region of ``nbytes``.

    Raises:
        ValueError: it does not.
    """
    if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > nbytes:
        raise ValueError(f"no {place.nbytes} bytes at {place.offset} of region {place.region}")


class SystemRegion:
    """One region: a part of a file in shared memory. ``close()`` leaves it to the last array over it."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self._fd = os.dup(fd)
        self._start = offset
        self._nbytes = nbytes
        self._view: memoryview | None = None
        self._watch: Watch | None = None

    def view(self, place: Place) -> memoryview:
        """The bytes of a place.

        Raises:
            RegionError: the file has been shrunk since the region was registered.
            ValueError: the place is not in the region.
        """
        check_inside(place, self._nbytes)
        self.check(place)
        try:
            view = self._mapped()
        except (ValueError, OSError):  # it has been shrunk since the check
            raise self._shrunk(place) from None
        return view[place.offset : place.offset + place.nbytes]

    def read(self, place: Place, target: memoryview) -> None:
        """Copy the bytes of a place; raises as ``view``, also where it shrank meanwhile."""
        copy_bytes(target, self.view(place))
        self.check(place)

    def begin_read(self, place: Place, target: memoryview) -> bool:
        """As ``read``: there is nothing to wait for."""
        self.read(place, target)
        return False

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        """Have the bytes of a place put there; raises as ``read``."""
        put(self.view(place))
        self.check(place)

    def check(self, place: Place) -> None:
        """Do nothing where the place is still there, and was while it was in use.

        Raises:
            RegionError: it is not.
        """
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

    def close(self) -> None:
        """Let go of the file, and of its mapping unless an array is over it."""
        os.close(self._fd)
        self._view = None

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

    def read(self, place: Place, target: memoryview) -> None:
        raise RegionError(self._problem)

    def begin_read(self, place: Place, target: memoryview) -> bool:
        raise RegionError(self._problem)

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        raise RegionError(self._problem)

    def check(self, place: Place) -> None:
        raise RegionError(self._problem)

    def close(self) -> None:
        pass


class Regions:
    """Every region that the front has told this worker of, by number. ``device`` is the worker's, or None."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self._memories: OpenMemories | None = None
        self._regions: dict[int, _Region] = {}

    def attach(self, number: int, fd: int, offset: int, nbytes: int) -> None:
        """A client registered a region of system memory; ``fd`` stays the caller's."""
        self._regions[number] = SystemRegion(fd, offset, nbytes)

    def attach_cuda(self, number: int, nbytes: int, raw_handle: bytes) -> str:
        """A client registered a region of memory of the worker's device: why it cannot be used, or nothing.

        Raises:
            CudaError: the device cannot be used any more.
        """
        try:
            self._regions[number] = self._opened(nbytes, raw_handle)
        except RegionError as error:
            self._regions[number] = _NoRegion(f"a region of CUDA memory is not there: {error}")
            return str(error)
        return ""

    def _opened(self, nbytes: int, raw_handle: bytes) -> _Region:
        if self._device is None:
            raise RegionError(_NO_DEVICE)
        from gpuserve_worker.cuda.client_regions import OpenMemories, open_region

        if self._memories is None:
            self._memories = OpenMemories(self._device)
        return open_region(self._device, self._memories, nbytes, raw_handle)

    def detach(self, number: int) -> None:
        """No batch will name this region any more."""
        self._regions.pop(number).close()

    def view(self, place: Place) -> memoryview:
        """The bytes of a place in system memory, writable.

        Raises:
            RegionError, ValueError: as ``SystemRegion.view``.
            KeyError: there is no such region.
        """
        region = self._regions[place.region]
        if not isinstance(region, SystemRegion):
            raise ValueError(f"region {place.region} is not of system memory")
        return region.view(place)

    def read(self, place: Place, target: memoryview) -> None:
        """Copy the bytes of a place.

        Raises:
            RegionError: they are not there, or were not until the end.
        """
        self._regions[place.region].read(place, target)

    def begin_read(self, place: Place, target: memoryview) -> bool:
        """As ``read``. True: the bytes are there only after ``end_reads``, which many reads may share."""
        return self._regions[place.region].begin_read(place, target)

    def end_reads(self) -> None:
        """Wait for what was begun; raises as ``read``."""
        if self._device is not None:
            from gpuserve_worker.cuda.client_regions import end_reads

            end_reads(self._device)

    @property
    def any_on_device(self) -> bool:
        """Whether a region of device memory is open."""
        return self._memories is not None and len(self._memories) > 0

    def on_device(self, number: int) -> ClientRegion | None:
        """The region of that number, if it is open and of device memory."""
        if self._memories is None:  # nearly always: no client ever registered one
            return None
        from gpuserve_worker.cuda.client_regions import ClientRegion

        region = self._regions.get(number)
        return region if isinstance(region, ClientRegion) else None

    def write(self, place: Place, put: Callable[[memoryview], None]) -> None:
        """Have the bytes of a place put where they belong; raises as ``read``."""
        self._regions[place.region].write(place, put)

    def check(self, place: Place) -> None:
        """To be called after a view was used; raises as ``SystemRegion.check``.

        A region that has gone with its front is of no interest to anybody.
        """
        region = self._regions.get(place.region)
        if region is not None:
            region.check(place)

    def close(self) -> None:
        """Let go of all of them."""
        for number in list(self._regions):
            self.detach(number)
