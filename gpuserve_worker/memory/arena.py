"""Tensor memory shared between processes: an allocator of blocks in sealed memfds without a name. ``Arena``
owns memory: it creates segments, allocates blocks and frees them. ``Mapping`` maps segments that another
process owns.

A segment is a memfd with ``F_SEAL_SHRINK``, so no peer can remove pages under a mapping (SIGBUS). Its pages
are reserved with ``posix_fallocate``, after a check of the available memory of the machine and of our control
group: a full machine is an error here, never a SIGBUS or an OOM kill later. A claimed block is reserved while
it is filled. ``segments.py`` reserves pages.

Empty segments up to ``RETAINED_NBYTES`` are kept, because making one (reserve, clear, map, send) costs as
much as copying into it. Others are closed, and so are segments that were unused for a while
(``Arena.shrink``). If pages are locked, which costs several times as much, the arena keeps the peak of recent
use.

Memory that Python deletes before its owner frees it is reclaimed by ``Orphans``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeAlias

from gpuserve_worker.memory.segments import (
    SEGMENT_NBYTES,
    SPARED_NBYTES,
    ArenaSegment,
    available_nbytes,
    unmap,
)


class Owner(Protocol):
    """An object that holds memory. ``memory_kind`` is a label of the metric of reclaimed memory."""

    @property
    def memory_kind(self) -> str: ...

    def reclaim(self) -> None:
        """Free the memory."""


#: The values of ``memory_kind``, which are metric labels.
ARENA_BLOCK: Final = "arena_block"
LENT_BLOCK: Final = "lent_block"
OUTPUT_LEASE: Final = "output_lease"
INTAKE_SHARE: Final = "intake_share"
KINDS: Final = (ARENA_BLOCK, LENT_BLOCK, OUTPUT_LEASE, INTAKE_SHARE)


class Orphans:
    """Owners of memory that were deleted before they freed it, and how many of each kind have been reclaimed.

    An owner of memory that must be freed by a call (a block of an arena, a lease of a worker's outputs, a
    share of the intake) adds itself in ``__del__``. No reference to a deleted owner is left, so nothing else
    can use or free its memory. ``__del__`` may run in any thread and inside any other call, so it only
    records the owner; the event loop frees the memory later, by ``reclaim``.
    """

    def __init__(self) -> None:
        self._found: deque[Owner] = deque()
        self._reclaimed: Counter[str] = Counter(dict.fromkeys(KINDS, 0))

    def add(self, owner: Owner) -> None:
        """Record an owner that is being deleted. Safe in any thread and in ``__del__``."""
        self._found.append(owner)

    def reclaim(self) -> Counter[str]:
        """Free the memory of all recorded owners, in the event loop's thread. Return their number by kind."""
        counted: Counter[str] = Counter()
        while self._found:
            owner = self._found.popleft()
            counted[owner.memory_kind] += 1
            self._reclaimed[owner.memory_kind] += 1
            owner.reclaim()
        return counted

    @property
    def reclaimed(self) -> Counter[str]:
        """The number of reclaimed owners of each kind since the start of the process."""
        return self._reclaimed


#: The only instance of the process, because any thread may delete an owner.
ORPHANS: Final = Orphans()


#: Alignment of blocks: enough for any vector load, and rows of a batch stay aligned.
ALIGNMENT: Final = 64
#: Empty memory that an arena keeps for the next burst.
RETAINED_NBYTES: Final = 256 << 20
#: Blocks of the largest recent size for which locked memory is kept: three running batches and the next one.
_LOCKED_BLOCKS: Final = 4
#: Limit of segments with unreserved pages, which claims make; each takes two descriptors.
MAX_SPARSE_SEGMENTS: Final = 32
#: An arena is full if blocks hold this part of its limit.
_FULL: Final = 7 / 8
#: A client may hold this many times the free memory: 7/8 of a limit if it is alone, 7/15 beside another
#: client that uses all it can get, and so on. (The dynamic thresholds of shared switch buffers.)
SHARE_OF_FREE: Final = 7
#: Memory is reserved in steps of this size; the available memory is checked before each.
_STEP_NBYTES: Final = 4 << 20


#: The address of a client, in the form by which connections are counted.
Source: TypeAlias = str | bytes


class OutOfMemory(Exception):
    """The limit of the arena, or the machine's memory, does not allow this block."""


class PageLocks(Protocol):
    """An observer of mappings that locks their pages for a device."""

    def lock(self, memory: memoryview) -> None: ...

    def unlock(self, memory: memoryview) -> None: ...


class SegmentSupplier(Protocol):
    """A supplier of segments that were made in advance."""

    def pop(self) -> ArenaSegment | None:
        """Return a fully reserved segment of ``SEGMENT_NBYTES``, or None if none is ready."""


def _no_memory(nbytes: int, error: OSError) -> OutOfMemory:
    return OutOfMemory(f"no shared memory for {nbytes} bytes: {error.strerror}")


def _new_segment(nbytes: int, *, is_claim: bool = False) -> ArenaSegment:
    try:
        return ArenaSegment(nbytes, is_claim=is_claim)
    except OSError as error:
        raise _no_memory(nbytes, error) from error


class Block:
    """``nbytes`` of an arena of this process at ``offset`` of a segment, with a writable view. ``arena`` is
    None after the block is freed. A block that is deleted before is reclaimed by ``Orphans``.
    """

    __slots__ = ("arena", "counted_nbytes", "nbytes", "offset", "segment", "source", "view")

    memory_kind = ARENA_BLOCK

    def __init__(
        self, segment: int, offset: int, nbytes: int, view: memoryview, arena: Arena | None = None
    ) -> None:
        self.arena = arena
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.view = view
        #: The client to whose share of the arena the block counts, and how many of its bytes count.
        self.source: Source = ""
        self.counted_nbytes = 0

    def __len__(self) -> int:
        return self.nbytes

    def __del__(self) -> None:
        if self.arena is not None and self.arena.has(self):
            ORPHANS.add(self)

    def free(self) -> None:
        """Free the block, unless it is free already."""
        if self.arena is not None:
            self.arena.free(self)

    def reclaim(self) -> None:
        self.free()

    def reserve(self, nbytes: int, source: Source = "") -> int:
        """Reserve the first ``nbytes`` of a claimed block for a client ("": unknown, and not counted). Return
        the number of writable bytes. Raise ``OutOfMemory`` if the client's share, the arena's limit or the
        machine does not allow it.
        """
        return self.nbytes if self.arena is None else self.arena.reserve(self, nbytes, source)


class ArenaStatistics(NamedTuple):
    """An arena's statistics. ``allocated - freed == blocks``, which is 0 when no block is in use."""

    segments: int
    nbytes: int
    blocks: int
    block_nbytes: int
    allocated: int
    freed: int


class _RecentUse(NamedTuple):
    """The peak of allocated bytes, and the largest block, since the last ``shrink``."""

    peak_nbytes: int
    largest_nbytes: int


class Arena:
    """Shared memory that this process owns. Not thread-safe. ``on_segment(segment, fd, nbytes)`` is called
    for each new segment, which must be sent to borrowers, and ``on_drop(segment)`` for each closed one.
    """

    def __init__(
        self,
        limit_nbytes: int,
        on_segment: Callable[[int, int, int], None],
        on_drop: Callable[[int], None],
        locks: PageLocks | None = None,
        spares: SegmentSupplier | None = None,
    ) -> None:
        self.limit_nbytes = limit_nbytes
        self._on_segment = on_segment
        self._on_drop = on_drop
        self._locks = locks
        self._spares = spares
        self._segments: dict[int, ArenaSegment] = {}
        self._next_segment = 0
        self._nbytes = 0
        self._empty_nbytes = 0
        self._block_nbytes = 0
        #: Recorded only if pages are locked.
        self._recent = _RecentUse(0, 0)
        self._allocated = 0
        self._freed = 0
        #: Reserved bytes of claimed blocks, in total and by client.
        self._counted_nbytes = 0
        self._by_source: dict[Source, int] = {}

    def allocate(self, nbytes: int) -> Block:
        """Return an undefined block; raise ``OutOfMemory`` by the arena's limit or the machine's."""
        block = self._place(nbytes, is_claim=False, is_sparse=False)
        assert block is not None, "only claims are bounded"
        segment = self._segments[block.segment]
        if segment.reserved_nbytes < segment.nbytes:  # the segment was made for a claim
            try:
                self._reserve(block, nbytes)
            except OutOfMemory:
                self.free(block)
                raise
        return block

    def claim(self, nbytes: int) -> Block | None:
        """Return a block without reserved pages, to be filled from its beginning, each part after
        ``Block.reserve``. Return None if too many blocks are being filled. Raise ``OutOfMemory`` if the
        machine does not allow it.
        """
        return self._place(nbytes, is_claim=True, is_sparse=True)

    def sparse(self, nbytes: int) -> Block:
        """Return a block that is filled by ``reserve`` like a claimed one, but is needed with certainty."""
        block = self._place(nbytes, is_claim=False, is_sparse=True)
        assert block is not None, "only claims are bounded"
        return block

    def reserve(self, block: Block, nbytes: int, source: Source = "", *, is_body: bool = True) -> int:
        """Reserve as ``Block.reserve``. Bodies of requests need as much memory again, for joined batches and
        responses, so the check of available memory is stricter.
        """
        counts = bool(source) and self.has(block)
        if counts:
            self._check_share(block, nbytes, source)
        there = self._reserve(block, nbytes, is_body=is_body)
        if counts:
            block.source = source
            self._count(block, there)
        return there

    def _check_share(self, block: Block, nbytes: int, source: Source) -> None:
        """Raise ``OutOfMemory`` if a client would hold too much. Its only block may have any size."""
        held_nbytes = self._by_source.get(source, 0)
        more_nbytes = nbytes - block.counted_nbytes
        free_nbytes = self.limit_nbytes - self._counted_nbytes - more_nbytes
        is_first = held_nbytes == block.counted_nbytes
        if more_nbytes > 0 and not is_first and held_nbytes + more_nbytes > SHARE_OF_FREE * free_nbytes:
            raise OutOfMemory(
                f"requests from this address hold {held_nbytes} bytes of the arena, expected at most "
                f"{SHARE_OF_FREE} times what is free of {self.limit_nbytes} with {more_nbytes} more"
            )

    def _count(self, block: Block, nbytes: int) -> None:
        """Set the bytes of a block that count to its client's share."""
        more_nbytes = nbytes - block.counted_nbytes
        block.counted_nbytes = nbytes
        self._counted_nbytes += more_nbytes
        of_source = self._by_source.get(block.source, 0) + more_nbytes
        if of_source:
            self._by_source[block.source] = of_source
        else:
            self._by_source.pop(block.source, None)

    def _reserve(self, block: Block, nbytes: int, *, is_body: bool = False) -> int:
        """Reserve the beginning of a block. Borrowers learn of a segment when its first block is fully
        reserved, because they need it no earlier.
        """
        segment, begin = self._segments.get(block.segment), block.offset
        if segment is None:  # the model is gone: later data take pages as they are written
            return block.nbytes
        if segment.reserved_nbytes == segment.nbytes and segment.is_announced:
            return block.nbytes
        self._fill(segment, begin, begin + max(nbytes, 1), is_body=is_body)
        there = min(segment.missing(begin, begin + max(block.nbytes, 1))[0] - begin, block.nbytes)
        if there == block.nbytes and not segment.is_announced:
            self._tell(block.segment, segment)
        return there

    def _fill(self, segment: ArenaSegment, start: int, end: int, *, is_body: bool = False) -> None:
        """Reserve this range of a segment in steps, because other processes may reserve at the same time."""
        while (missing := segment.missing(start, end))[0] < missing[1]:
            first, last = missing[0], min(missing[1], missing[0] + _STEP_NBYTES)
            self._make_room(last - first, is_body=is_body)
            try:
                segment.reserve(first, last)
            except OSError as error:
                raise _no_memory(last - first, error) from error
            self._nbytes += last - first

    def has(self, block: Block) -> bool:
        """Return whether the segment of a block is still open. The unload of a model closes its segments."""
        return block.segment in self._segments

    def free(self, block: Block) -> None:
        """Free a block, also after ``close()``. Its view must not be used afterwards."""
        block.arena = None
        size = max(ALIGNMENT, -(-block.nbytes // ALIGNMENT) * ALIGNMENT)
        block.view.release()
        segment = self._segments.get(block.segment)
        if segment is None:  # the segment is closed, and this view was the last user of its memory
            return
        if block.counted_nbytes:
            self._count(block, 0)
        segment.allocator.free(block.offset, size)
        self._freed += 1
        self._block_nbytes -= size
        if segment.allocator.empty:
            self._empty_nbytes += segment.reserved_nbytes
            if segment.is_announced:
                recent = self._recent
                self._trim(max(RETAINED_NBYTES, recent.peak_nbytes, _LOCKED_BLOCKS * recent.largest_nbytes))
            else:  # no block of the segment was ever filled
                self._abort(block.segment)

    def shrink(self) -> None:
        """Close segments that were empty at the last call and unused since. The oldest segment of minimal
        size stays open for occasional requests. Called periodically.
        """
        self._recent = _RecentUse(self._block_nbytes, 0)
        is_oldest = True
        for number, segment in list(self._segments.items()):
            if segment.nbytes <= SEGMENT_NBYTES and is_oldest:
                is_oldest = False
            elif segment.allocator.empty and segment.is_idle:
                self._abort(number)
            else:
                segment.is_idle = segment.allocator.empty

    @property
    def is_full(self) -> bool:
        """True if blocks hold most of the limit; only parts of fully reserved segments count as free."""
        held_nbytes = 0
        for segment in self._segments.values():
            is_whole = segment.reserved_nbytes == segment.nbytes
            held_nbytes += segment.reserved_nbytes - (segment.allocator.free_nbytes if is_whole else 0)
        return held_nbytes >= _FULL * self.limit_nbytes

    def segments(self) -> list[tuple[int, int, int]]:
        """Return (segment, fd, nbytes) of every announced segment, for a borrower that attaches later."""
        return [(number, one.fd, one.nbytes) for number, one in self._segments.items() if one.is_announced]

    def statistics(self) -> ArenaStatistics:
        return ArenaStatistics(
            len(self._segments),
            self._nbytes,
            self._allocated - self._freed,
            self._block_nbytes,
            self._allocated,
            self._freed,
        )

    def abandon(self) -> None:
        """Start with new segments; unfreed blocks keep their memory, and do not count any more."""
        self.close()
        self._empty_nbytes = self._block_nbytes = self._counted_nbytes = 0
        self._by_source.clear()
        self._freed = self._allocated

    def close(self) -> None:
        for number in list(self._segments):
            self._drop(number)

    def _place(self, nbytes: int, *, is_claim: bool, is_sparse: bool) -> Block | None:
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        found = self._find(size)
        if found is None:
            sparse = [one for one in self._segments.values() if one.reserved_nbytes < one.nbytes]
            if is_claim and len(sparse) >= MAX_SPARSE_SEGMENTS:
                return None
            found = self._add(size, is_claim=is_claim, is_sparse=is_sparse)
        number, offset = found
        self._allocated += 1
        self._block_nbytes += size
        peak_nbytes, largest_nbytes = self._recent
        if self._locks is not None and (self._block_nbytes > peak_nbytes or size > largest_nbytes):
            self._recent = _RecentUse(max(peak_nbytes, self._block_nbytes), max(largest_nbytes, size))
        view = self._segments[number].view[offset : offset + nbytes]
        return Block(number, offset, nbytes, view, self)

    def _find(self, size: int) -> tuple[int, int] | None:
        """Return a free range of an open segment. Small blocks use a large segment only if no other has room,
        because they would keep all of it open.
        """
        for is_last in (False, True):
            for number, segment in self._segments.items():
                if (size <= SEGMENT_NBYTES < segment.nbytes) is not is_last:
                    continue
                was_empty = segment.allocator.empty
                offset = segment.allocator.allocate(size)
                if offset is not None:
                    if was_empty:
                        self._empty_nbytes -= segment.reserved_nbytes
                        segment.is_idle = False
                    return number, offset
        return None

    def _add(self, size: int, *, is_claim: bool, is_sparse: bool) -> tuple[int, int]:
        """Return a free range of a new segment. All of the segment is reserved unless it is sparse."""
        nbytes = max(SEGMENT_NBYTES, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        segment = _new_segment(nbytes, is_claim=is_claim) if is_sparse else self._whole(nbytes)
        number = self._next_segment
        self._next_segment += 1
        self._segments[number] = segment
        if not is_sparse:
            self._tell(number, segment)
        offset = segment.allocator.allocate(size)
        assert offset is not None, "a new segment has room for the block it was made for"
        return number, offset

    def _whole(self, nbytes: int) -> ArenaSegment:
        self._keep_limit(nbytes)
        if self._spares is not None and nbytes == SEGMENT_NBYTES and (spare := self._spares.pop()):
            self._nbytes += nbytes
            return spare
        self._make_room(nbytes)
        segment = _new_segment(nbytes)
        try:
            self._fill(segment, 0, nbytes)
        except OutOfMemory:
            self._nbytes -= segment.reserved_nbytes
            segment.close()
            raise
        return segment

    def _tell(self, number: int, segment: ArenaSegment) -> None:
        segment.is_announced = True
        if self._locks is not None:
            self._locks.lock(segment.view)
        self._on_segment(number, segment.fd, segment.nbytes)

    def _trim(self, retained_nbytes: int) -> None:
        for number in reversed(list(self._segments)):
            if self._empty_nbytes <= retained_nbytes:
                return
            if self._segments[number].allocator.empty:
                self._abort(number)

    def _make_room(self, nbytes: int, *, is_body: bool = False) -> None:
        """Check as ``_keep_limit``; raise ``OutOfMemory`` also if the machine would have too little."""
        self._keep_limit(nbytes)
        available = available_nbytes()
        spared_nbytes = max(SPARED_NBYTES, self._nbytes if is_body else 0)
        if available is not None and nbytes > available - spared_nbytes:
            raise OutOfMemory(
                f"no shared memory for {nbytes} bytes: {available} bytes are available, and {spared_nbytes} "
                "are to be left"
            )

    def _keep_limit(self, nbytes: int) -> None:
        """Close empty segments if ``nbytes`` more exceed the limit; raise ``OutOfMemory`` if too few."""
        if self._nbytes + nbytes > self.limit_nbytes:
            self._trim(0)
        if self._nbytes + nbytes > self.limit_nbytes:
            raise OutOfMemory(
                f"the arena would grow to {self._nbytes + nbytes} bytes, "
                f"over its limit of {self.limit_nbytes}"
            )

    def _abort(self, number: int) -> None:
        self._empty_nbytes -= self._segments[number].reserved_nbytes
        self._drop(number)

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number)
        self._nbytes -= segment.reserved_nbytes
        if segment.is_announced:
            self._on_drop(number)
            if self._locks is not None:
                self._locks.unlock(segment.view)
        segment.close()


class Mapping:
    """Mapped memory of another process, by segment number: to be read and written, not freed."""

    def __init__(self, locks: PageLocks | None = None) -> None:
        self._maps: dict[int, tuple[mmap.mmap, memoryview]] = {}
        self._locks = locks

    def attach(self, segment: int, fd: int, nbytes: int) -> None:
        """Map a segment of the caller's ``fd``; raise ``ValueError`` if it is short or not sealed."""
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < nbytes:
            raise ValueError(f"segment {segment} is not a sealed memory of {nbytes} bytes")
        mapped = mmap.mmap(fd, nbytes)
        view = memoryview(mapped)
        if self._locks is not None:
            self._locks.lock(view)
        self._maps[segment] = (mapped, view)

    def view(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Return a new view of these bytes. Raise ``ValueError`` if they are not inside a mapped segment."""
        _, whole = self._maps.get(segment, (None, None))
        if whole is None or offset < 0 or nbytes < 0 or offset + nbytes > len(whole):
            raise ValueError(f"no {nbytes} bytes at {offset} of segment {segment}")
        return whole[offset : offset + nbytes]

    def detach(self, segment: int) -> None:
        mapped, whole = self._maps.pop(segment)
        if self._locks is not None:
            self._locks.unlock(whole)
        unmap(mapped, whole)

    def close(self) -> None:
        for segment in list(self._maps):
            self.detach(segment)
