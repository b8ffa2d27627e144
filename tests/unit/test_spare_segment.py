"""A segment that is made before it is needed, and the arenas that take it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from gpuserve_worker.memory.arena import Arena, OutOfMemory
from gpuserve_worker.memory.segments import SEGMENT_NBYTES, SpareSegment


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
        self.arena = Arena(
            2 * SEGMENT_NBYTES, lambda number, *_: self.told.append(number), lambda _: None, spares=self.spare
        )

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
    segment = scene.spare.pop()
    assert segment is not None
    assert segment.missing(0, SEGMENT_NBYTES) == (SEGMENT_NBYTES, SEGMENT_NBYTES)
    assert os.fstat(segment.fd).st_blocks * 512 == SEGMENT_NBYTES
    segment.close()


def test_the_next_one_is_made_later_and_there_is_one_at_most(scene: Scene) -> None:
    scene.spare.make()
    scene.spare.make()
    first = scene.spare.pop()
    assert first is not None
    assert scene.spare.pop() is None
    scene.do_what_is_left()
    second = scene.spare.pop()
    assert second is not None
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


def test_large_blocks_and_claims_leave_it(scene: Scene) -> None:
    scene.spare.make()
    large, claim = scene.arena.allocate(SEGMENT_NBYTES + 1), scene.arena.claim(100)
    assert claim is not None
    assert not scene.later
    for one in (large, claim):
        one.free()


def test_an_arena_at_its_limit_leaves_it(scene: Scene) -> None:
    blocks = [scene.arena.allocate(SEGMENT_NBYTES) for _ in range(2)]
    scene.spare.make()
    with pytest.raises(OutOfMemory, match="limit"):
        scene.arena.allocate(1)
    assert not scene.later
    for one in blocks:
        one.free()


def test_nothing_is_kept_after_its_end(scene: Scene) -> None:
    scene.spare.make()
    scene.spare.close()
    assert (scene.locks.locked, scene.spare.pop()) == (0, None)
    scene.spare.make()
    assert (scene.locks.locked, scene.spare.pop()) == (0, None)
