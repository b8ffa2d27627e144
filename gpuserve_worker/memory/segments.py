"""One segment of shared memory on its owner's side: a sealed memfd, its mapping, and which of its pages are
there. How much memory there may be, and who gets which part of it, is the arena's to say.

Where the kernel gives shared memory huge pages to who asks for them, a segment that is filled at once has
them: making 16 MiB takes a tenth of the time then, and locking them next to none. The kernel gives a huge
page to who touches a mapping, and small ones to who reserves a file. So the pages are touched first there,
by a call that fails where there are none, and never kills; with small pages that order is the slower one.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
from contextlib import suppress
from typing import Final

from gpuserve_worker.memory.touching import touch

#: Memory is reserved in multiples of this.
UNIT_NBYTES: Final = 16 << 10
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: What the kernel says for who asks; "inherit" in the folder of a size sends to the file of all sizes.
_GIVEN: Final = frozenset({"always", "within_size", "advise", "force"})
_ALL_SIZES: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_ONE_SIZE: Final = "sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled"


class OwnedSegment:
    """``nbytes`` of memory, ``in_huge_pages`` as far as the kernel has some. Pages that are not reserved, a
    flag for each unit, must not be written. The constructor and ``reserve`` raise ``OSError``: the kernel has
    no memory or descriptor left.
    """

    __slots__ = ("_address", "_is_huge", "_units", "fd", "map", "nbytes", "reserved_nbytes", "view")

    def __init__(self, nbytes: int, *, in_huge_pages: bool) -> None:
        self.fd = os.memfd_create("gpuserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.map = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED)
        except OSError:
            os.close(self.fd)
            raise
        self.view = memoryview(self.map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.nbytes = nbytes
        self.reserved_nbytes = 0
        self._units = bytearray(-(-nbytes // UNIT_NBYTES))
        self._is_huge = in_huge_pages
        if in_huge_pages:
            with suppress(OSError):
                self.map.madvise(mmap.MADV_HUGEPAGE)

    def missing(self, start: int, end: int) -> tuple[int, int]:
        """Where the first run in this range begins and ends that is not reserved; equal where all is."""
        last = -(-end // UNIT_NBYTES)
        first = self._units.find(0, start // UNIT_NBYTES, last)
        if first < 0:
            return end, end
        after = self._units.find(1, first, last)
        return first * UNIT_NBYTES, min(self.nbytes, (last if after < 0 else after) * UNIT_NBYTES)

    def reserve(self, start: int, end: int) -> None:
        nbytes = end - start
        if self._is_huge:
            touch(self._address + start, nbytes)
        os.posix_fallocate(self.fd, start, nbytes)
        if not self._is_huge:
            touch(self._address + start, nbytes)
        first, last = start // UNIT_NBYTES, -(-end // UNIT_NBYTES)
        self._units[first:last] = b"\1" * (last - first)
        self.reserved_nbytes += nbytes

    def close(self) -> None:
        """Give it up; the memory is there until the last view of it has died."""
        unmap(self.map, self.view)
        os.close(self.fd)


def unmap(mapped: mmap.mmap, view: memoryview) -> None:
    """Unmap now, or leave it to the last array over it: the mapping dies with its last reference."""
    with suppress(BufferError):
        view.release()
        mapped.close()


@functools.cache
def huge_pages_are_given(root: str = "") -> bool:
    """Whether this kernel gives shared memory huge pages to who asks for them."""
    word = _chosen(f"{root}/{_ONE_SIZE}")
    return (_chosen(f"{root}/{_ALL_SIZES}") if word in {"", "inherit"} else word) in _GIVEN


def _chosen(path: str) -> str:
    """The word in brackets of a file of the kernel, as of "always [never]"; nothing where there is none."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
