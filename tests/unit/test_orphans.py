"""Memory whose owner is deleted before the owner gave the memory back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve_worker.memory.arena import ARENA_BLOCK, INTAKE_SHARE, ORPHANS, Arena, Block

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _none_of_others() -> Iterator[None]:
    ORPHANS.reclaim()
    yield
    assert ORPHANS.reclaim() == {}


def arena(limit_nbytes: int = 64 * MIB) -> Arena:
    return Arena(limit_nbytes, lambda *_: None, lambda _: None)


@given(st.lists(st.sampled_from(["free", "free twice", "drop", "keep"]), max_size=20))
def test_a_block_is_reclaimed_exactly_if_nobody_can_free_it(fates: list[str]) -> None:
    memory = arena()
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


def test_a_block_that_is_deleted_in_another_thread_is_freed_in_this_one() -> None:
    memory = arena()
    held = [memory.allocate(MIB)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert memory.statistics().blocks == 1
    assert ORPHANS.reclaim() == {ARENA_BLOCK: 1}
    assert memory.statistics().blocks == 0
    memory.close()


def test_a_block_of_a_closed_arena_is_no_orphan() -> None:
    memory = arena()
    block = memory.allocate(MIB)
    memory.close()
    del block
    assert ORPHANS.reclaim() == {}


def test_a_share_of_the_intake_is_reclaimed() -> None:
    intake = Intake(MIB)
    share = Share(intake, "here", 100)
    share.hold(1000)
    assert intake.nbytes == 1100
    before = ORPHANS.reclaimed[INTAKE_SHARE]
    del share
    assert ORPHANS.reclaim() == {INTAKE_SHARE: 1}
    assert (intake.nbytes, ORPHANS.reclaimed[INTAKE_SHARE]) == (0, before + 1)
