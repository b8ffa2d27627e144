"""The regions of shared memory that clients registered, as a worker sees them: mapped when first used, read
and written in place. A region's file is the client's, who may write to it or shrink it at any time: that
may spoil what it asked for, and nothing else.

A borrower: who registers, and who may, is the front's business.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from gpuserve_worker.payloads import Place
from gpuserve_worker.shrink_guard import GUARD, Watch

#: Where a file can be mapped from.
_GRANULARITY: Final = mmap.ALLOCATIONGRANULARITY


class RegionError(Exception):
    """A client's region is not what it was registered as. The text is one sentence for the client."""


class SystemRegion:
    """One region: a part of a file in shared memory. ``close()`` leaves it to the last array over it."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self._fd = os.dup(fd)
        self._start = offset
        self._nbytes = nbytes
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._watch: Watch | None = None

    def view(self, place: Place) -> memoryview:
        """The bytes of a place.

        Raises:
            RegionError: the file has been shrunk since the region was registered.
            ValueError: the place is not in the region.
        """
        if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > self._nbytes:
            raise ValueError(f"no {place.nbytes} bytes at {place.offset} of region {place.region}")
        self.check(place)
        try:
            view = self._mapped()
        except (ValueError, OSError):  # it has been shrunk since the check
            raise self._shrunk(place) from None
        return view[place.offset : place.offset + place.nbytes]

    def check(self, place: Place) -> None:
        """Do nothing where the place is still there, and was while it was in use.

        Raises:
            RegionError: it is not.
        """
        whole = self._watch is None or not self._watch.broken
        if whole and os.fstat(self._fd).st_size >= self._start + place.offset + place.nbytes:
            return
        raise self._shrunk(place)

    def _shrunk(self, place: Place) -> RegionError:
        return RegionError(
            "a region of shared memory that the request names has shrunk since it was registered: expected "
            f"{place.nbytes} bytes at offset {place.offset} of it"
        )

    def close(self) -> None:
        """Let go of the file, and of its mapping unless an array is over it."""
        os.close(self._fd)
        if self._map is None or self._view is None or self._watch is None:
            return
        try:
            self._view.release()
            self._map.close()
        except BufferError:  # then the mapping stays, and stays watched
            return
        GUARD.unwatch(self._watch)

    def _mapped(self) -> memoryview:
        if self._view is None:
            # A file is mapped from a page on; what of the page is before the region is not looked at.
            before = self._start % _GRANULARITY
            length = before + self._nbytes
            self._map = mmap.mmap(self._fd, length, offset=self._start - before)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
            self._watch = GUARD.watch(address, pages)
            self._view = memoryview(self._map)[before:]
        return self._view


class Regions:
    """Every region that the front has told this worker of, by number."""

    def __init__(self) -> None:
        self._regions: dict[int, SystemRegion] = {}

    def attach(self, number: int, fd: int, offset: int, nbytes: int) -> None:
        """A client registered a region; ``fd`` stays the caller's."""
        self._regions[number] = SystemRegion(fd, offset, nbytes)

    def detach(self, number: int) -> None:
        """No batch will name this region any more."""
        self._regions.pop(number).close()

    def view(self, place: Place) -> memoryview:
        """The bytes of a place, writable; raises as ``SystemRegion.view``, and KeyError for no region."""
        return self._regions[place.region].view(place)

    def check(self, place: Place) -> None:
        """To be called after a view was used; raises as ``SystemRegion.check``."""
        self._regions[place.region].check(place)

    def close(self) -> None:
        """Let go of all of them."""
        for number in list(self._regions):
            self.detach(number)
