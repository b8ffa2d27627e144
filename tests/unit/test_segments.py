"""Segments of shared memory: which pages are there, in which way they are made, and the spare one."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from present import present

from gpuserve_worker.memory.arena import Arena, OutOfMemory
from gpuserve_worker.memory.segments import (
    SEGMENT_NBYTES,
    UNIT_NBYTES,
    OwnedSegment,
    SpareSegment,
    huge_pages_are_given,
    touch,
)

NBYTES = 5 << 20


@pytest.fixture(params=[False, True])
def segment(request: pytest.FixtureRequest) -> Iterator[OwnedSegment]:
    made = OwnedSegment(NBYTES, in_huge_pages=request.param)
    yield made
    made.close()


def pages_there(segment: OwnedSegment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_what_is_reserved_is_there_and_holds_what_is_written(segment: OwnedSegment) -> None:
    assert segment.missing(0, NBYTES) == (0, NBYTES)
    segment.reserve(0, NBYTES)
    assert (segment.missing(0, NBYTES), segment.reserved_nbytes) == ((NBYTES, NBYTES), NBYTES)
    assert pages_there(segment) >= NBYTES
    values = np.frombuffer(segment.view, np.uint8)
    values[:] = 7
    assert os.pread(segment.fd, 1, NBYTES - 1) == b"\x07"
    del values


def test_a_part_is_reserved_and_the_rest_is_missing(segment: OwnedSegment) -> None:
    segment.reserve(0, UNIT_NBYTES)
    segment.reserve(4 * UNIT_NBYTES, 5 * UNIT_NBYTES)
    assert segment.missing(0, NBYTES) == (UNIT_NBYTES, 4 * UNIT_NBYTES)
    assert segment.missing(4 * UNIT_NBYTES, 4 * UNIT_NBYTES + 1)[0] == 4 * UNIT_NBYTES + 1
    assert segment.reserved_nbytes == 2 * UNIT_NBYTES


def test_nothing_is_there_that_nobody_reserved_and_nobody_can_shrink_it(segment: OwnedSegment) -> None:
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.fd, 1)
    segment = OwnedSegment(NBYTES, in_huge_pages=False)
    assert pages_there(segment) == 0
    segment.close()


@pytest.mark.parametrize(
    ("all_sizes", "one_size", "given"),
    [
        ("always within_size advise [never] deny force", "always [inherit] within_size advise never", False),
        ("always within_size [advise] never deny force", "always [inherit] within_size advise never", True),
        ("always within_size advise [never] deny force", "always inherit within_size [advise] never", True),
        ("[always] within_size advise never deny force", "always inherit within_size advise [never]", False),
        ("always within_size [advise] never deny force", None, True),
        ("always within_size advise never [deny] force", None, False),
        (None, None, False),
    ],
)
def test_whether_the_kernel_gives_huge_pages(
    tmp_path: Path, all_sizes: str | None, one_size: str | None, given: bool
) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    (folder / "hugepages-2048kB").mkdir(parents=True)
    for name, text in (("shmem_enabled", all_sizes), ("hugepages-2048kB/shmem_enabled", one_size)):
        if text is not None:
            (folder / name).write_text(f"{text}\n")
    assert huge_pages_are_given(str(tmp_path)) is given


# ---- a segment that is made before it is needed ----


class CountedLocks:
    """Counts the mappings that are locked."""

    def __init__(self) -> None:
        self.locked = 0

    def lock_now(self, memory: memoryview) -> None:
        self.locked += 1

    def unlock(self, memory: memoryview) -> None:
        self.locked -= 1


class Scene:
    """A spare segment, and what is to be done later."""

    def __init__(self) -> None:
        self.locks = CountedLocks()
        self.later: list[Callable[[], None]] = []
        self.spare = SpareSegment(self.locks, self.later.append)
        self.told: list[int] = []
        tell = lambda number, *_: self.told.append(number)  # noqa: E731
        self.arena = Arena(2 * SEGMENT_NBYTES, tell, lambda _: None, spares=self.spare)

    def do_what_is_left(self) -> None:
        while self.later:
            self.later.pop(0)()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.arena.close()
    made.spare.close()


def test_it_is_whole_and_locked_when_it_is_taken(scene: Scene) -> None:
    scene.spare.make()
    assert scene.locks.locked == 1
    segment = present(scene.spare.pop())
    assert segment.missing(0, SEGMENT_NBYTES) == (SEGMENT_NBYTES, SEGMENT_NBYTES)
    assert os.fstat(segment.fd).st_blocks * 512 == SEGMENT_NBYTES
    segment.close()


def test_the_next_one_is_made_later_and_there_is_one_at_most(scene: Scene) -> None:
    scene.spare.make()
    scene.spare.make()
    first = present(scene.spare.pop())
    assert scene.spare.pop() is None
    scene.do_what_is_left()
    second = present(scene.spare.pop())
    assert scene.locks.locked == 2
    for one in (first, second):
        one.close()


def test_an_arena_grows_by_it_and_tells_of_it(scene: Scene) -> None:
    scene.spare.make()
    block = scene.arena.allocate(1 << 20)
    assert scene.arena.statistics().nbytes == SEGMENT_NBYTES
    assert (scene.told, len(scene.later)) == ([0], 1)
    block.view[:] = bytes(1 << 20)
    block.free()


def test_large_blocks_claims_and_an_arena_at_its_limit_leave_it(scene: Scene) -> None:
    scene.spare.make()
    for block in (scene.arena.allocate(SEGMENT_NBYTES + 1), present(scene.arena.claim(100))):
        block.free()
    blocks = [scene.arena.allocate(SEGMENT_NBYTES * 2)]
    with pytest.raises(OutOfMemory, match="limit"):
        scene.arena.allocate(1)
    assert not scene.later
    for block in blocks:
        block.free()


def test_nothing_is_kept_after_its_end(scene: Scene) -> None:
    scene.spare.make()
    scene.spare.close()
    assert (scene.locks.locked, scene.spare.pop()) == (0, None)
    scene.spare.make()
    assert (scene.locks.locked, scene.spare.pop()) == (0, None)


PREFAULTED_NBYTES = 9 << 20


@pytest.mark.parametrize("nbytes", [PREFAULTED_NBYTES, mmap.PAGESIZE])
def test_pages_are_prefaulted_and_what_has_no_memory_behind_it_is_left_as_it_is(nbytes: int) -> None:
    """A store where there is no memory would end the process."""
    fd = os.memfd_create("touched")
    os.ftruncate(fd, PREFAULTED_NBYTES)
    memory = mmap.mmap(fd, PREFAULTED_NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    os.ftruncate(fd, nbytes)
    touch(address, PREFAULTED_NBYTES)
    there = os.fstat(fd).st_blocks * 512
    assert there >= PREFAULTED_NBYTES if nbytes == PREFAULTED_NBYTES else there <= 2 << 20
    memory.close()
    os.close(fd)
