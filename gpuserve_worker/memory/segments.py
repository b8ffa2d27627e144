"""Segments of shared memory on the owner's side: available memory, page reservation, free ranges, and spare
segments.

A memfd has no limit of its own: reserving more memory than is available wakes the OOM killer, which may
choose any process. ``available_nbytes`` therefore reads the limits of the machine and of all control groups.
A container sees its own group at the root of the mount (cgroup v2 and v1). A systemd service is in a group
further down, named by ``/proc/self/cgroup``, and every group above it has a limit as well.

If the kernel gives huge pages to shared memory on request, a segment that is filled at once requests them:
making 16 MiB then takes a tenth of the time, and locking the pages almost none. The kernel gives a huge page
when a mapping is touched, and small pages when a file range is reserved. With huge pages the mapping is
therefore touched first, by a call that fails without memory and never kills; with small pages that order is
slower.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Executor


class _Files(NamedTuple):
    """The mount point of one cgroup version, and the files of a group with its limit and usage."""

    mount: str
    limit: str
    usage: str


_V2: Final = _Files("sys/fs/cgroup", "memory.max", "memory.current")
_V1: Final = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
_STATISTICS: Final = "memory.stat"
#: Page cache of the group, which the kernel reclaims before it kills. Shared memory is not part of it.
_RECLAIMABLE: Final = frozenset({"active_file", "inactive_file"})
#: cgroup v1 writes a number near 2**63 for no limit, v2 a word.
_NO_LIMIT: Final = 1 << 62


#: MemTotal, MemFree and MemAvailable are the first lines.
_MEMINFO_LINES: Final = 3


def available_nbytes(root: str = "") -> int | None:
    """Return the bytes that the machine and our control groups can still reserve, or None if unknown.

    A virtual machine that grows with its use, such as that of a Kata container, has less memory now than a
    control group may use. There the groups alone decide.
    """
    groups = [found for one in _groups(root) if (found := _of_group(*one)) is not None]
    left = [limit - used for limit, used in groups]
    lines = _text(f"{root}/proc/meminfo").split("\n", _MEMINFO_LINES)[:_MEMINFO_LINES]
    machine = {
        name: int(text.split()[0]) * 1024 for name, _, text in (line.partition(":") for line in lines if line)
    }
    if "MemAvailable" in machine and min(groups, default=(0, 0))[0] <= machine["MemTotal"]:
        left.append(machine["MemAvailable"])
    return max(0, min(left)) if left else None


@functools.cache
def _groups(root: str) -> list[tuple[str, _Files]]:
    """Return the folders of this process's control groups, which do not change, and of their parents."""
    found = []
    for line in ["0::/", "0:memory:/", *_text(f"{root}/proc/self/cgroup").splitlines()]:
        _, controllers, path = line.split(":", 2)
        files = _V1 if "memory" in controllers.split(",") else _V2
        if (files is _V1 or not controllers) and ".." not in path:
            names = path.strip("/").split("/")
            each = ("/".join([root, files.mount, *names[:n]]) for n in range(len(names), -1, -1))
            found += [(one.rstrip("/"), files) for one in each if os.path.exists(f"{one}/{files.limit}")]
    return list(dict.fromkeys(found))


def _of_group(folder: str, files: _Files) -> tuple[int, int] | None:
    """Return the limit of a group and its use, without what the kernel can reclaim; None if unlimited."""
    limit = _text(f"{folder}/{files.limit}").strip()
    if not limit.isdigit() or int(limit) > _NO_LIMIT:
        return None
    usage = _text(f"{folder}/{files.usage}").strip()
    if not usage.isdigit():
        return None
    # The usage in v1 includes child groups, as do the statistics with the prefix "total_".
    lines = [line.removeprefix("total_") for line in _text(f"{folder}/{_STATISTICS}").splitlines()]
    named = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(limit), max(0, int(usage) - sum(int(named.get(name, "0")) for name in _RECLAIMABLE))


def _text(path: str) -> str:
    """Return the contents of a kernel file, or "" if it does not exist."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode()
    except OSError:
        return ""


#: MADV_POPULATE_WRITE, from Linux 5.14 on.
_POPULATE_WRITE: Final = 23
#: Step size, because other threads cannot map or unmap memory during the call.
_TOUCH_STEP_NBYTES: Final = 4 << 20


def touch(address: int, nbytes: int) -> None:
    """Populate all pages from ``address``, which is page-aligned. If the kernel does not support that, or has
    no memory, the pages are populated when they are written. Unlike ``mmap.madvise``, this call releases the
    GIL.
    """
    madvise = ctypes.CDLL(None).madvise
    for start in range(0, nbytes, _TOUCH_STEP_NBYTES):
        length = min(_TOUCH_STEP_NBYTES, nbytes - start)
        if madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _POPULATE_WRITE):
            return


#: Memory is reserved in multiples of this.
UNIT_NBYTES: Final = 16 << 10
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: Kernel settings that give huge pages on request. The value "inherit" for one page size refers to the
#: setting for all sizes.
_GIVEN: Final = frozenset({"always", "within_size", "advise", "force"})
_ALL_SIZES: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_ONE_SIZE: Final = "sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled"


class OwnedSegment:
    """``nbytes`` of memory in a memfd, with huge pages if requested and available. Unreserved pages must not
    be written; a flag for each unit records reservation. The constructor and ``reserve`` raise ``OSError`` if
    the kernel has no memory or descriptor left.
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
        """Return start and end of the first unreserved part of a range; equal if there is none."""
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
        """Close the segment. The memory exists until the last view of it is deleted."""
        unmap(self.map, self.view, self.fd)


def unmap(mapped: mmap.mmap, view: memoryview, fd: int = -1) -> None:
    """Unmap memory and close ``fd``: now, or soon by a thread if the memory is large, since the kernel takes
    1 ms to free a MiB. The mapping lives as long as any array over it.
    """
    if len(view) > SEGMENT_NBYTES:
        _unmapping().submit(_unmap, mapped, view, fd)
    else:
        _unmap(mapped, view, fd)


def _unmap(mapped: mmap.mmap, view: memoryview, fd: int) -> None:
    with suppress(BufferError):
        view.release()
        mapped.close()
    if fd >= 0:
        os.close(fd)


@functools.cache
def _unmapping() -> Executor:
    from concurrent.futures import ThreadPoolExecutor  # most workers have no large tensors

    return ThreadPoolExecutor(1, "unmapping")


@functools.cache
def huge_pages_are_given(root: str = "") -> bool:
    """Return whether this kernel gives huge pages to shared memory on request."""
    word = _chosen(f"{root}/{_ONE_SIZE}")
    return (_chosen(f"{root}/{_ALL_SIZES}") if word in {"", "inherit"} else word) in _GIVEN


def _chosen(path: str) -> str:
    """Return the word in brackets of a kernel file such as "always [never]", or "" if it does not exist."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


#: Minimal size of a segment; a larger block gets a segment of its own size.
SEGMENT_NBYTES: Final = 16 << 20
#: Memory that is left to other users of the machine: reserving the last byte wakes the OOM killer.
SPARED_NBYTES: Final = 32 << 20


class Allocator:
    """A first-fit allocator of offsets in one segment, which merges adjacent free ranges. Free ranges are
    sorted and few, since small tensors are never allocated here, so a linear search is short.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._offsets = [0]
        self._lengths = [nbytes]

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of ``nbytes`` (already aligned), or None."""
        for position, length in enumerate(self._lengths):
            if length >= nbytes:
                offset = self._offsets[position]
                if length == nbytes:
                    del self._offsets[position], self._lengths[position]
                else:
                    self._offsets[position] += nbytes
                    self._lengths[position] -= nbytes
                return offset
        return None

    def free(self, offset: int, nbytes: int) -> None:
        position = bisect.bisect(self._offsets, offset)
        self._offsets.insert(position, offset)
        self._lengths.insert(position, nbytes)
        for left in (position, position - 1):
            right = left + 1
            if left < 0 or right >= len(self._offsets):
                continue
            if self._offsets[left] + self._lengths[left] == self._offsets[right]:
                self._lengths[left] += self._lengths[right]
                del self._offsets[right], self._lengths[right]

    @property
    def free_nbytes(self) -> int:
        return sum(self._lengths)

    @property
    def empty(self) -> bool:
        return self._lengths == [self._nbytes]


class ArenaSegment(OwnedSegment):
    """A segment and its free ranges. ``is_announced``: borrowers know the segment. ``is_idle``: the segment
    was empty at the last ``shrink`` and unused since.
    """

    __slots__ = ("allocator", "is_announced", "is_idle")

    def __init__(self, nbytes: int, *, is_claim: bool) -> None:
        # Claimed memory uses small pages, so that unfilled parts take no memory.
        super().__init__(nbytes, in_huge_pages=not is_claim and huge_pages_are_given())
        self.is_idle = False
        self.is_announced = False
        self.allocator = Allocator(nbytes)


class SegmentLocks(Protocol):
    """A locker of the pages of a segment."""

    def lock_now(self, memory: memoryview) -> None: ...

    def unlock(self, memory: memoryview) -> None: ...


class SpareSegment:
    """At most one fully reserved and locked segment of ``SEGMENT_NBYTES``, made in advance because reserving,
    clearing and locking take longer than most batches. ``later`` schedules the making of the next one.
    Thread-safe.
    """

    def __init__(self, locks: SegmentLocks, later: Callable[[Callable[[], None]], None]) -> None:
        self._locks = locks
        self._later = later
        self._segment: ArenaSegment | None = None
        self._lock = threading.Lock()
        self._is_over = False

    def make(self) -> None:
        """Make a spare segment, unless one is ready or the machine has no memory for one."""
        if self._segment is not None or (segment := _made()) is None:
            return
        self._locks.lock_now(segment.view)
        with self._lock:
            if not self._is_over and self._segment is None:
                self._segment = segment
                return
        self._abort(segment)

    def pop(self) -> ArenaSegment | None:
        """Return the spare segment, or None if none is ready, and schedule the making of the next one."""
        with self._lock:
            segment, self._segment = self._segment, None
        if segment is not None:
            self._later(self.make)
        return segment

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            segment, self._segment = self._segment, None
        if segment is not None:
            self._abort(segment)

    def _abort(self, segment: ArenaSegment) -> None:
        self._locks.unlock(segment.view)
        segment.close()


def _made() -> ArenaSegment | None:
    available = available_nbytes()
    if available is not None and available < SEGMENT_NBYTES + SPARED_NBYTES:
        return None
    try:
        segment = ArenaSegment(SEGMENT_NBYTES, is_claim=False)
    except OSError:
        return None
    try:
        segment.reserve(0, SEGMENT_NBYTES)
    except OSError:
        segment.close()
        return None
    return segment
