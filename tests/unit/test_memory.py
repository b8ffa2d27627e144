"""Arenas hand out each byte once, take everything back, and give their memory up; mappings share it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from present import present
from processes import wait_until

from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve_worker.cuda.device.arrays import SizedCache
from gpuserve_worker.memory.arena import (
    ALIGNMENT,
    ARENA_BLOCK,
    INTAKE_SHARE,
    MAX_SPARSE_SEGMENTS,
    ORPHANS,
    RETAINED_NBYTES,
    Arena,
    Block,
    Mapping,
    OutOfMemory,
)
from gpuserve_worker.memory.segments import SEGMENT_NBYTES, Allocator


class Borrower:
    """Follows an arena's segments, as a peer process does."""

    def __init__(self) -> None:
        self.mapping = Mapping()
        self.dropped: list[int] = []

    def segment(self, segment: int, fd: int, nbytes: int) -> None:
        self.mapping.attach(segment, fd, nbytes)

    def drop(self, segment: int) -> None:
        self.dropped.append(segment)
        self.mapping.detach(segment)


@pytest.fixture
def borrower() -> Borrower:
    return Borrower()


@pytest.fixture
def arena(borrower: Borrower) -> Iterator[Arena]:
    """An arena of up to 1 GiB; it leaves no descriptor open."""
    before = set(os.listdir("/proc/self/fd"))
    arena = Arena(1 << 30, borrower.segment, borrower.drop)
    yield arena
    arena.close()
    ORPHANS.reclaim()  # blocks that the test did not free
    wait_until(lambda: set(os.listdir("/proc/self/fd")) == before, "large segments are closed by a thread")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_an_allocator_hands_out_each_byte_once(steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(200)
    held: list[tuple[int, int]] = []
    for is_free, number in steps:
        if is_free and held:
            allocator.free(*held.pop(number % len(held)))
            continue
        offset = allocator.allocate(number)
        if offset is not None:
            assert 0 <= offset <= 200 - number
            assert all(offset + number <= other or other + length <= offset for other, length in held)
            held.append((offset, number))
    for run in held:
        allocator.free(*run)
    assert allocator.empty
    assert allocator.allocate(200) == 0


def test_an_allocator_refuses_what_does_not_fit() -> None:
    allocator = Allocator(100)
    assert [allocator.allocate(nbytes) for nbytes in (101, 60, 41, 40)] == [None, 0, None, 60]


def test_a_borrower_sees_what_the_owner_wrote(arena: Arena, borrower: Borrower) -> None:
    block = arena.allocate(1000)
    block.view[:] = bytes(range(250)) * 4
    seen = borrower.mapping.view(block.segment, block.offset, 1000)
    assert bytes(seen) == bytes(range(250)) * 4
    seen[0] = 99
    assert block.view[0] == 99


def test_large_blocks_have_segments_of_their_own_and_small_ones_are_aligned_and_as_long_as_asked(
    arena: Arena, borrower: Borrower
) -> None:
    arena.allocate(SEGMENT_NBYTES)
    large = arena.allocate(3 * SEGMENT_NBYTES + 1)
    assert len(arena.segments()) == 2
    assert len(borrower.mapping.view(large.segment, 0, large.nbytes)) == 3 * SEGMENT_NBYTES + 1
    blocks = [arena.allocate(nbytes) for nbytes in (0, 1, 63, 64, 65)]
    assert [len(one.view) for one in blocks] == [0, 1, 63, 64, 65]
    assert all(one.offset % ALIGNMENT == 0 for one in blocks)
    assert len({one.offset for one in blocks}) == len(blocks)


def test_empty_memory_beyond_what_is_retained_is_given_up(arena: Arena, borrower: Borrower) -> None:
    blocks = [arena.allocate(RETAINED_NBYTES // 2) for _ in range(3)]
    assert arena.statistics().blocks == 3
    for block in blocks:
        arena.free(block)
    counts = arena.statistics()
    assert (counts.blocks, counts.block_nbytes, counts.allocated, counts.freed) == (0, 0, 3, 3)
    assert (len(borrower.dropped), counts.nbytes) == (1, RETAINED_NBYTES)


class CountedLocks:
    """Counts the segments that were locked."""

    def __init__(self) -> None:
        self.locked = 0

    def lock(self, memory: memoryview) -> None:
        self.locked += 1

    def unlock(self, memory: memoryview) -> None:
        pass


def test_locked_memory_is_kept_as_long_as_as_much_is_in_use_at_once(borrower: Borrower) -> None:
    """Page-locking 128 MiB takes a GPU's driver longer than three copies of them."""
    locks = CountedLocks()
    arena = Arena(1 << 30, borrower.segment, borrower.drop, locks)
    for _ in range(3):
        for block in [arena.allocate(RETAINED_NBYTES // 2) for _ in range(3)]:
            arena.free(block)
    assert (locks.locked, borrower.dropped) == (3, [])
    for _ in range(3):
        arena.shrink()
    assert len(borrower.dropped) == 3, "it is given up when nothing uses it"
    arena.close()


def test_what_nothing_has_used_from_one_look_to_the_next_is_given_up(
    arena: Arena, borrower: Borrower
) -> None:
    blocks = [arena.allocate(nbytes) for nbytes in (100, 3 * SEGMENT_NBYTES, SEGMENT_NBYTES)]
    _, large, second = (block.segment for block in blocks)
    for block in blocks:
        arena.free(block)
    arena.shrink()
    assert borrower.dropped == [], "all of it was in use since the last look"
    arena.free(arena.allocate(2 * SEGMENT_NBYTES))
    arena.shrink()
    assert borrower.dropped == [second]
    held = arena.allocate(2 * SEGMENT_NBYTES)
    for _ in range(3):
        arena.shrink()
    arena.free(held)
    arena.shrink()
    assert borrower.dropped == [second]
    arena.shrink()
    assert borrower.dropped == [second, large]
    assert arena.statistics().nbytes == SEGMENT_NBYTES


def test_small_blocks_keep_no_large_segment(arena: Arena, borrower: Borrower) -> None:
    large = arena.allocate(3 * SEGMENT_NBYTES)
    small = arena.allocate(100)
    arena.free(large)
    arena.free(small)
    for _ in range(3):
        arena.free(arena.allocate(100))
        arena.shrink()
    assert borrower.dropped == [large.segment]


def test_one_segment_stays_for_who_comes_now_and_then(arena: Arena, borrower: Borrower) -> None:
    blocks = [arena.allocate(SEGMENT_NBYTES) for _ in range(4)]
    for block in blocks:
        arena.free(block)
    for _ in range(3):
        arena.shrink()
    assert arena.statistics().nbytes == SEGMENT_NBYTES
    assert len(borrower.dropped) == 3
    arena.free(arena.allocate(100))


def test_the_limit_is_kept_and_empty_segments_make_room(borrower: Borrower) -> None:
    arena = Arena(4 * SEGMENT_NBYTES, borrower.segment, borrower.drop)
    small = arena.allocate(100)
    with pytest.raises(OutOfMemory, match="limit"):
        arena.allocate(4 * SEGMENT_NBYTES)
    arena.free(small)
    arena.allocate(4 * SEGMENT_NBYTES)
    assert borrower.dropped == [small.segment]
    arena.close()


def test_a_claim_takes_memory_as_it_is_filled_and_is_told_when_it_is_whole(
    arena: Arena, borrower: Borrower
) -> None:
    nbytes = 200 << 20
    block = present(arena.claim(nbytes))
    assert (arena.statistics().nbytes, arena.segments()) == (0, [])
    assert 1 <= block.reserve(1) <= 1 << 16
    assert 0 < arena.statistics().nbytes <= 1 << 16
    assert arena.segments() == []
    assert block.reserve(nbytes) == nbytes
    assert arena.statistics().nbytes == nbytes
    assert len(borrower.mapping.view(block.segment, 0, nbytes)) == nbytes
    block.free()


def test_what_was_filled_once_is_there_for_the_next_claim(arena: Arena) -> None:
    for _ in range(2):
        block = present(arena.claim(1 << 20))
        first = block.reserve(1)
        block.reserve(1 << 20)
        block.free()
    assert first == 1 << 20
    assert arena.allocate(SEGMENT_NBYTES).segment == block.segment
    assert arena.statistics().nbytes == SEGMENT_NBYTES


def test_a_claim_is_filled_to_its_end_though_its_arena_is_closed(arena: Arena) -> None:
    """As the body of a request is whose model is reloaded while it arrives."""
    block = present(arena.claim(SEGMENT_NBYTES))
    block.reserve(1)
    arena.close()
    assert block.reserve(SEGMENT_NBYTES) == SEGMENT_NBYTES
    block.view[-1] = 7
    block.free()


def test_claims_that_are_not_filled_are_bounded_and_leave_nothing(arena: Arena, borrower: Borrower) -> None:
    claims = [present(arena.claim(SEGMENT_NBYTES)) for _ in range(MAX_SPARSE_SEGMENTS)]
    assert arena.claim(SEGMENT_NBYTES) is None
    for block in claims:
        block.free()
    block = present(arena.claim(64 << 20))
    block.reserve(1)
    block.free()
    assert (arena.statistics().nbytes, arena.statistics().segments, borrower.dropped) == (0, 0, [])


def test_the_limit_is_for_what_is_filled(borrower: Borrower) -> None:
    arena = Arena(2 * SEGMENT_NBYTES, borrower.segment, borrower.drop)
    first, second, _ = (present(arena.claim(2 * SEGMENT_NBYTES)) for _ in range(3))
    first.reserve(SEGMENT_NBYTES + 1)
    with pytest.raises(OutOfMemory, match="limit"):
        second.reserve(SEGMENT_NBYTES)
    first.free()
    assert second.reserve(2 * SEGMENT_NBYTES) == 2 * SEGMENT_NBYTES
    arena.close()


def test_an_array_outlives_the_segment(arena: Arena, borrower: Borrower) -> None:
    block = arena.allocate(64)
    block.view[:] = b"\x07" * 64
    array = np.frombuffer(borrower.mapping.view(block.segment, block.offset, 64), np.uint8)
    segment = block.segment
    arena.free(block)
    arena.close()
    assert borrower.dropped == [segment]
    assert array.sum() == 7 * 64


@pytest.mark.parametrize(
    ("segment", "offset", "nbytes"),
    [(9, 0, 1), (0, -1, 1), (0, 0, -1), (0, SEGMENT_NBYTES, 1), (0, 1, SEGMENT_NBYTES), (0, 1 << 70, 1)],
)
def test_a_view_outside_of_what_is_mapped(
    arena: Arena, borrower: Borrower, segment: int, offset: int, nbytes: int
) -> None:
    arena.allocate(1)
    with pytest.raises(ValueError, match="segment"):
        borrower.mapping.view(segment, offset, nbytes)


def test_memory_that_a_peer_could_take_away_or_that_is_shorter_than_announced_is_not_mapped(
    arena: Arena,
) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    arena.allocate(1)
    ((_, sealed, nbytes),) = arena.segments()
    for given_fd, length in ((fd, 4096), (sealed, nbytes + 1)):
        with pytest.raises(ValueError, match="sealed"):
            Mapping().attach(0, given_fd, length)
    os.close(fd)


def test_an_arena_is_full_while_blocks_hold_most_of_its_limit(borrower: Borrower) -> None:
    arena = Arena(2 * SEGMENT_NBYTES, borrower.segment, borrower.drop)
    whole, half = arena.allocate(SEGMENT_NBYTES), arena.allocate(SEGMENT_NBYTES // 2)
    assert not arena.is_full, "a quarter is free"
    rest = arena.allocate(SEGMENT_NBYTES // 2)
    assert arena.is_full
    rest.free()
    assert not arena.is_full
    for block in (whole, half):
        block.free()
    claimed = present(arena.claim(2 * SEGMENT_NBYTES))
    assert not arena.is_full, "nothing of it has come"
    claimed.reserve(2 * SEGMENT_NBYTES)
    assert arena.is_full
    claimed.free()
    arena.close()


# ---- memory whose owner is deleted before it gave the memory back ----


MIB = 1 << 20


@pytest.fixture
def _no_other_orphans() -> Iterator[None]:
    ORPHANS.reclaim()
    yield
    assert ORPHANS.reclaim() == {}


def small_arena(limit_nbytes: int = 64 * MIB) -> Arena:
    return Arena(limit_nbytes, lambda *_: None, lambda _: None)


@pytest.mark.usefixtures("_no_other_orphans")
@given(st.lists(st.sampled_from(["free", "free twice", "drop", "keep"]), max_size=20))
def test_a_block_is_reclaimed_exactly_if_nobody_can_free_it(fates: list[str]) -> None:
    memory = small_arena()
    kept: list[Block] = []
    for fate in fates:
        block = memory.allocate(MIB)
        if fate == "keep":
            kept.append(block)
        elif fate != "drop":
            block.free()
        if fate == "free twice":
            block.free()
        del block
    assert ORPHANS.reclaim().get(ARENA_BLOCK, 0) == fates.count("drop")
    assert memory.statistics().blocks == len(kept)
    for n, block in enumerate(kept):
        block.view[:] = bytes((n,)) * MIB
    assert [block.view[-1] for block in kept] == list(range(len(kept)))
    for block in kept:
        block.free()
    memory.close()


@pytest.mark.usefixtures("_no_other_orphans")
def test_a_block_that_is_deleted_in_another_thread_is_freed_in_this_one() -> None:
    memory = small_arena()
    held = [memory.allocate(MIB)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert memory.statistics().blocks == 1
    assert ORPHANS.reclaim() == {ARENA_BLOCK: 1}
    assert memory.statistics().blocks == 0
    memory.close()


@pytest.mark.usefixtures("_no_other_orphans")
def test_a_block_of_a_closed_arena_is_no_orphan() -> None:
    memory = small_arena()
    block = memory.allocate(MIB)
    memory.close()
    del block
    assert ORPHANS.reclaim() == {}


@pytest.mark.usefixtures("_no_other_orphans")
def test_a_share_of_the_intake_is_reclaimed() -> None:
    intake = Intake(MIB)
    share = Share(intake, "here", 100)
    share.hold(1000)
    assert intake.nbytes == 1100
    before = ORPHANS.reclaimed[INTAKE_SHARE]
    del share
    assert ORPHANS.reclaim() == {INTAKE_SHARE: 1}
    assert (intake.nbytes, ORPHANS.reclaimed[INTAKE_SHARE]) == (0, before + 1)


def test_what_was_free_all_the_time_is_unused() -> None:
    cache: SizedCache[str] = SizedCache(1000)
    for nbytes, item in ((10, "a"), (20, "b"), (30, "c")):
        cache.put(nbytes, item)
    assert cache.unused() == [], "it came since the last time"
    assert cache.pop(20) == "b"
    cache.put(20, "b")
    assert cache.unused() == ["a", "c"], "b was needed"
    assert cache.unused() == ["b"]
    assert cache.nbytes == 0
