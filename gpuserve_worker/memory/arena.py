"""Tensor memory shared between processes: sealed memfds without a name. ``Arena`` owns memory: it creates
segments, hands out blocks and takes them back. ``Mapping`` borrows: it maps what another process owns.

A segment is a memfd with ``F_SEAL_SHRINK``, so no peer can take pages away under a mapping (SIGBUS). Its
pages are reserved with ``posix_fallocate``, after a look at what the machine and our control group have left:
a full machine is an error here, never a SIGBUS or an OOM kill later. A block that somebody only claims is
reserved while it is filled. How pages come to be there is in ``segments.py``. Empty segments are kept up to
``RETAINED_NBYTES``, because making one (reserve, clear, map, send) costs as much as copying into it; beyond
that they are given up, and when nothing has used them for a while (``Arena.shrink``). Where pages are locked,
which costs several times as much, all is kept that was in use at once of late.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeAlias

from gpuserve_worker.memory.available import available_nbytes
from gpuserve_worker.memory.orphans import ARENA_BLOCK, ORPHANS
from gpuserve_worker.memory.segments import OwnedSegment, huge_pages_are_given, unmap

#: Blocks start on this boundary: enough for any vector load, and rows of a batch stay aligned.
ALIGNMENT: Final = 64
#: What a segment measures at least; a larger block gets a segment of its own size.
SEGMENT_NBYTES: Final = 16 << 20
#: How much empty memory an arena keeps for the next burst.
RETAINED_NBYTES: Final = 256 << 20
#: Blocks of the largest size of late for which locked memory is kept: three batches under way, and the next.
_LOCKED_BLOCKS: Final = 4
#: What is left for whoever does not ask: reserving the last byte wakes the OOM killer.
SPARED_NBYTES: Final = 32 << 20
#: Segments that claims may leave without some of their pages; each takes two descriptors.
MAX_SPARSE_SEGMENTS: Final = 32
#: An arena is full if blocks hold so large a part of its limit.
_FULL: Final = 7 / 8
#: A client may hold so many times what is left free: 7/8 of a limit if it is alone, 7/15 beside another
#: client that takes all it can get, and so on. (The dynamic thresholds of buffers that switches share.)
SHARE_OF_FREE: Final = 7
#: So much is reserved until the machine is asked again what it has left.
_STEP_NBYTES: Final = 4 << 20


#: The address of a client, as connections are counted by it.
Source: TypeAlias = str | bytes


class OutOfMemory(Exception):
    """The arena's limit, or the machine's memory, does not allow this block."""


class PageLocks(Protocol):
    """Who is told of every mapping while it is there, to lock its pages for a device."""

    def lock(self, memory: memoryview) -> None: ...

    def unlock(self, memory: memoryview) -> None: ...


class Spares(Protocol):
    """Who makes segments before they are needed."""

    def take(self) -> ArenaSegment | None:
        """A whole segment of ``SEGMENT_NBYTES``; None where there is none at the moment."""


class Allocator:
    """Offsets of free space in one segment: first fit, neighbours merge. Free runs are kept sorted; there are
    few, since small tensors never come here, so a linear search is short.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._offsets = [0]
        self._lengths = [nbytes]

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a free run of ``nbytes`` (already aligned), or None."""
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
    """A segment and the free space in it. ``is_told``: borrowers know of it. ``is_idle``: it was empty when
    the arena was to shrink, and nothing has used it since.
    """

    __slots__ = ("allocator", "is_idle", "is_told")

    def __init__(self, nbytes: int, *, is_claim: bool) -> None:
        # What a client only claims takes no more than came of it: small pages.
        super().__init__(nbytes, in_huge_pages=not is_claim and huge_pages_are_given())
        self.is_idle = False
        self.is_told = False
        self.allocator = Allocator(nbytes)


def _no_memory(nbytes: int, error: OSError) -> OutOfMemory:
    return OutOfMemory(f"no shared memory for {nbytes} bytes: {error.strerror}")


class Block:
    """``nbytes`` in an arena of this process, at ``offset`` of a segment, and a writable view of them. Of a
    free block ``arena`` is None. A block that is deleted before is an orphan, and is reclaimed.
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
        #: The client whose share of the arena it counts to, and how much of it does.
        self.source: Source = ""
        self.counted_nbytes = 0

    def __len__(self) -> int:
        return self.nbytes

    def __del__(self) -> None:
        if self.arena is not None and self.arena.has(self):
            ORPHANS.add(self)

    def free(self) -> None:
        """Give the block back; does nothing if the block is free already."""
        if self.arena is not None:
            self.arena.free(self)

    def reclaim(self) -> None:
        self.free()

    def reserve(self, nbytes: int, source: Source = "") -> int:
        """Reserve the first ``nbytes`` of a claimed block for a client ("": unknown, and not counted). Return
        how many can be written. Raise OutOfMemory if the client's share, the arena's limit or the machine
        does not allow it.
        """
        return self.nbytes if self.arena is None else self.arena.reserve(self, nbytes, source)


class ArenaStatistics(NamedTuple):
    """A moment of an arena. ``allocated - freed == blocks``; ``blocks`` is 0 when nothing is in flight."""

    segments: int
    nbytes: int
    blocks: int
    block_nbytes: int
    allocated: int
    freed: int


class _RecentUse(NamedTuple):
    """The most that was in blocks at once, and the largest of them."""

    peak_nbytes: int
    largest_nbytes: int


class Arena:
    """Shared memory that this process owns. Not thread-safe. ``on_segment(segment, fd, nbytes)`` is told of
    each new segment, which borrowers are to be sent, and ``on_drop(segment)`` of each one given up.
    """

    def __init__(
        self,
        limit_nbytes: int,
        on_segment: Callable[[int, int, int], None],
        on_drop: Callable[[int], None],
        locks: PageLocks | None = None,
        spares: Spares | None = None,
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
        #: Since the last call of ``shrink``; kept where pages are locked.
        self._recent = _RecentUse(0, 0)
        self._allocated = 0
        self._freed = 0
        #: What claimed blocks hold, altogether and by client.
        self._counted_nbytes = 0
        self._by_source: dict[Source, int] = {}

    def allocate(self, nbytes: int) -> Block:
        """A block, not cleared; ``OutOfMemory``: the arena's limit or the machine does not allow it."""
        block = self._place(nbytes, is_claim=False)
        assert block is not None, "only claims are bounded"
        segment = self._segments[block.segment]
        if segment.reserved_nbytes < segment.nbytes:  # it was made for a claim
            try:
                self._reserve(block, nbytes)
            except OutOfMemory:
                self.free(block)
                raise
        return block

    def claim(self, nbytes: int) -> Block | None:
        """A block of which nothing is there yet, to be filled from its beginning on, each part after
        ``Block.reserve``; None: too many are being filled. ``OutOfMemory``: the machine does not allow it.
        """
        return self._place(nbytes, is_claim=True)

    def reserve(self, block: Block, nbytes: int, source: Source = "") -> int:
        """As ``Block.reserve``. What bodies take will take as much again, for joined batches and answers."""
        counts = bool(source) and self.has(block)
        if counts:
            self._check_share(block, nbytes, source)
        there = self._reserve(block, nbytes, is_body=True)
        if counts:
            block.source = source
            self._count(block, there)
        return there

    def _check_share(self, block: Block, nbytes: int, source: Source) -> None:
        """Raise OutOfMemory if a client would hold too much; its only block may have any size."""
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
        """Count so much of a block to its client's share."""
        more_nbytes = nbytes - block.counted_nbytes
        block.counted_nbytes = nbytes
        self._counted_nbytes += more_nbytes
        of_source = self._by_source.get(block.source, 0) + more_nbytes
        if of_source:
            self._by_source[block.source] = of_source
        else:
            self._by_source.pop(block.source, None)

    def _reserve(self, block: Block, nbytes: int, *, is_body: bool = False) -> int:
        """Borrowers are told of a segment once a block of it is all there: they need it no earlier."""
        segment, begin = self._segments.get(block.segment), block.offset
        if segment is None:  # given up with its model: what still comes takes its pages as it is written
            return block.nbytes
        if segment.reserved_nbytes == segment.nbytes and segment.is_told:
            return block.nbytes
        self._fill(segment, begin, begin + max(nbytes, 1), is_body=is_body)
        there = min(segment.missing(begin, begin + max(block.nbytes, 1))[0] - begin, block.nbytes)
        if there == block.nbytes and not segment.is_told:
            self._tell(block.segment, segment)
        return there

    def _fill(self, segment: ArenaSegment, start: int, end: int, *, is_body: bool = False) -> None:
        """Have this range of a segment be there, in steps: other processes may reserve at the same time."""
        while (missing := segment.missing(start, end))[0] < missing[1]:
            first, last = missing[0], min(missing[1], missing[0] + _STEP_NBYTES)
            self._make_room(last - first, is_body=is_body)
            try:
                segment.reserve(first, last)
            except OSError as error:
                raise _no_memory(last - first, error) from error
            self._nbytes += last - first

    def has(self, block: Block) -> bool:
        """Return whether the segment of a block is still there: not given up with its model."""
        return block.segment in self._segments

    def free(self, block: Block) -> None:
        """Take a block back. Its view must not be used any more. It may come back after ``close()``."""
        block.arena = None
        size = max(ALIGNMENT, -(-block.nbytes // ALIGNMENT) * ALIGNMENT)
        block.view.release()
        segment = self._segments.get(block.segment)
        if segment is None:  # given up already, and its memory gone with this view
            return
        if block.counted_nbytes:
            self._count(block, 0)
        segment.allocator.free(block.offset, size)
        self._freed += 1
        self._block_nbytes -= size
        if segment.allocator.empty:
            self._empty_nbytes += segment.reserved_nbytes
            if segment.is_told:
                self._trim(self._retained_nbytes)
            else:  # nothing was ever filled
                self._give_up(block.segment)

    def shrink(self) -> None:
        """Called now and then: give up what was empty at the last call, and was not used since. The oldest
        segment of the least size stays, for whoever comes now and then.
        """
        self._recent = _RecentUse(self._block_nbytes, 0)
        is_oldest = True
        for number, segment in list(self._segments.items()):
            if segment.nbytes <= SEGMENT_NBYTES and is_oldest:
                is_oldest = False
            elif segment.allocator.empty and segment.is_idle:
                self._give_up(number)
            else:
                segment.is_idle = segment.allocator.empty

    @property
    def is_full(self) -> bool:
        """Return whether blocks hold most of what the limit allows. Free parts of a segment count once all of
        its pages are there.
        """
        held_nbytes = 0
        for segment in self._segments.values():
            is_whole = segment.reserved_nbytes == segment.nbytes
            held_nbytes += segment.reserved_nbytes - (segment.allocator.free_nbytes if is_whole else 0)
        return held_nbytes >= _FULL * self.limit_nbytes

    @property
    def _retained_nbytes(self) -> int:
        return max(RETAINED_NBYTES, self._recent.peak_nbytes, _LOCKED_BLOCKS * self._recent.largest_nbytes)

    def segments(self) -> list[tuple[int, int, int]]:
        """(segment, fd, nbytes) of every segment that borrowers know, for one that comes later."""
        return [(number, one.fd, one.nbytes) for number, one in self._segments.items() if one.is_told]

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
        """Begin anew with other segments. Blocks that are not freed yet lie in memory that nobody uses again,
        and do not count any more.
        """
        self.close()
        self._empty_nbytes = self._block_nbytes = self._counted_nbytes = 0
        self._by_source.clear()
        self._freed = self._allocated

    def close(self) -> None:
        for number in list(self._segments):
            self._drop(number)

    def _place(self, nbytes: int, *, is_claim: bool) -> Block | None:
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        found = self._find(size)
        if found is None:
            sparse = [one for one in self._segments.values() if one.reserved_nbytes < one.nbytes]
            if is_claim and len(sparse) >= MAX_SPARSE_SEGMENTS:
                return None
            found = self._add(size, is_claim=is_claim)
        number, offset = found
        self._allocated += 1
        self._block_nbytes += size
        if self._locks is not None:
            self._recent = _RecentUse(max(self._recent[0], self._block_nbytes), max(self._recent[1], size))
        view = self._segments[number].view[offset : offset + nbytes]
        return Block(number, offset, nbytes, view, self)

    def _find(self, size: int) -> tuple[int, int] | None:
        """Room in a segment that is there. Small blocks go to a large one only where no other has room: they
        would keep all of it.
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

    def _add(self, size: int, *, is_claim: bool) -> tuple[int, int]:
        """Room in a new segment, of which all is reserved unless it is made for a claim."""
        nbytes = max(SEGMENT_NBYTES, _page_align(size))
        segment = self._sparse(nbytes) if is_claim else self._whole(nbytes)
        number = self._next_segment
        self._next_segment += 1
        self._segments[number] = segment
        if not is_claim:
            self._tell(number, segment)
        offset = segment.allocator.allocate(size)
        assert offset is not None, "a new segment has room for the block it was made for"
        return number, offset

    def _sparse(self, nbytes: int) -> ArenaSegment:
        try:
            return ArenaSegment(nbytes, is_claim=True)
        except OSError as error:
            raise _no_memory(nbytes, error) from error

    def _whole(self, nbytes: int) -> ArenaSegment:
        self._keep_limit(nbytes)
        if self._spares is not None and nbytes == SEGMENT_NBYTES and (spare := self._spares.take()):
            self._nbytes += nbytes
            return spare
        self._make_room(nbytes)
        try:
            segment = ArenaSegment(nbytes, is_claim=False)
        except OSError as error:
            raise _no_memory(nbytes, error) from error
        try:
            self._fill(segment, 0, nbytes)
        except OutOfMemory:
            self._nbytes -= segment.reserved_nbytes
            segment.close()
            raise
        return segment

    def _tell(self, number: int, segment: ArenaSegment) -> None:
        segment.is_told = True
        if self._locks is not None:
            self._locks.lock(segment.view)
        self._on_segment(number, segment.fd, segment.nbytes)

    def _trim(self, retained_nbytes: int) -> None:
        for number in reversed(list(self._segments)):
            if self._empty_nbytes <= retained_nbytes:
                return
            if self._segments[number].allocator.empty:
                self._give_up(number)

    def _make_room(self, nbytes: int, *, is_body: bool = False) -> None:
        """As ``_keep_limit``; ``OutOfMemory`` also where the machine would have too little left."""
        self._keep_limit(nbytes)
        available = available_nbytes()
        spared_nbytes = max(SPARED_NBYTES, self._nbytes if is_body else 0)
        if available is not None and nbytes > available - spared_nbytes:
            raise OutOfMemory(
                f"no shared memory for {nbytes} bytes: {available} bytes are available, and {spared_nbytes} "
                "are to be left"
            )

    def _keep_limit(self, nbytes: int) -> None:
        """Give empty segments up where so much more would not be allowed; ``OutOfMemory``: in vain."""
        if self._nbytes + nbytes > self.limit_nbytes:
            self._trim(0)
        if self._nbytes + nbytes > self.limit_nbytes:
            raise OutOfMemory(
                f"the arena would grow to {self._nbytes + nbytes} bytes, "
                f"over its limit of {self.limit_nbytes}"
            )

    def _give_up(self, number: int) -> None:
        self._empty_nbytes -= self._segments[number].reserved_nbytes
        self._drop(number)

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number)
        self._nbytes -= segment.reserved_nbytes
        if segment.is_told:
            self._on_drop(number)
            if self._locks is not None:
                self._locks.unlock(segment.view)
        segment.close()


class Mapping:
    """Shared memory that another process owns, mapped here. It can be read and written, never freed."""

    def __init__(self, locks: PageLocks | None = None) -> None:
        self._maps: dict[int, tuple[mmap.mmap, memoryview]] = {}
        self._locks = locks

    def attach(self, segment: int, fd: int, nbytes: int) -> None:
        """Map a segment; ``fd`` stays the caller's. ``ValueError``: it is too short, or not sealed."""
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < nbytes:
            raise ValueError(f"segment {segment} is not a sealed memory of {nbytes} bytes")
        mapped = mmap.mmap(fd, nbytes)
        view = memoryview(mapped)
        if self._locks is not None:
            self._locks.lock(view)
        self._maps[segment] = (mapped, view)

    def view(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """A new view of exactly those bytes. Raises ``ValueError`` where not inside a mapped segment."""
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


def _page_align(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
