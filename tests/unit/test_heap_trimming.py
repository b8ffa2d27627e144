"""Memory that malloc retains is returned to the system if it is much and the process is idle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuserve.front.ipc.heap_memory import (
    BUSY,
    ENDED_NBYTES,
    SLACK_NBYTES,
    TRIM_PERIOD_S,
    MemoryUse,
    TrimPolicy,
)

MIB = 1 << 20
OWN_NBYTES = 30 * MIB


class Scene:
    """A heap that is looked at every few seconds."""

    def __init__(self) -> None:
        self.heap = TrimPolicy()
        self._now = 100.0
        self._cpu_s = 7.0
        self.look(used_nbytes=5 * MIB)

    def look(self, *, used_nbytes: int, kept_nbytes: int = 0, busy: float = 0.0) -> bool:
        self._now += TRIM_PERIOD_S
        self._cpu_s += busy * TRIM_PERIOD_S
        taken = MemoryUse(OWN_NBYTES + used_nbytes + kept_nbytes, used_nbytes)
        return self.heap.is_worth_trimming(taken, self._cpu_s, self._now)


def test_memory_in_use_is_no_reason_to_trim_and_what_is_kept_of_it_is() -> None:
    scene = Scene()
    assert not scene.look(used_nbytes=900 * MIB)
    assert not scene.look(used_nbytes=800 * MIB, kept_nbytes=SLACK_NBYTES)
    assert scene.look(used_nbytes=0, kept_nbytes=SLACK_NBYTES + 1)


def test_who_is_busy_does_not_trim() -> None:
    scene = Scene()
    assert not scene.look(used_nbytes=0, kept_nbytes=900 * MIB, busy=BUSY + 0.01)
    assert scene.look(used_nbytes=0, kept_nbytes=900 * MIB, busy=BUSY - 0.01)


def test_what_cannot_be_given_back_is_asked_for_again_when_there_is_more_or_when_a_burst_has_ended() -> None:
    scene = Scene()
    scene.heap.trimmed(MemoryUse(OWN_NBYTES + 200 * MIB, 0))
    assert not scene.look(used_nbytes=0, kept_nbytes=200 * MIB)
    assert not scene.look(used_nbytes=0, kept_nbytes=200 * MIB + SLACK_NBYTES)
    assert scene.look(used_nbytes=0, kept_nbytes=201 * MIB + SLACK_NBYTES)
    assert not scene.look(used_nbytes=0, kept_nbytes=200 * MIB - ENDED_NBYTES)
    assert scene.look(used_nbytes=0, kept_nbytes=199 * MIB - ENDED_NBYTES)
    scene.heap.trimmed(MemoryUse(OWN_NBYTES + 60 * MIB, 0))
    assert not scene.look(used_nbytes=0, kept_nbytes=60 * MIB)
    assert not scene.look(used_nbytes=0, kept_nbytes=SLACK_NBYTES)


_FREES = """
from gpuserve.front.ipc.heap_memory import TrimPolicy, Malloc
import ctypes
ctypes.CDLL(None).mallopt(-3, 64 << 20), ctypes.CDLL(None).mallopt(-1, 64 << 20)
heap, malloc = TrimPolicy(), Malloc()
before = malloc.memory_use()
heap.is_worth_trimming(before, 0, 1)
blocks = [bytes(5000) * 20 for _ in range(1000)]
full = malloc.memory_use()
in_use = heap.is_worth_trimming(full, 0, 2)
blocks = blocks[::100]
freed = malloc.memory_use()
kept = heap.is_worth_trimming(freed, 0, 3)
print(*(one.nbytes - before.nbytes for one in (full, freed, malloc.trim())), in_use, kept)
"""


def test_the_process_gives_back_what_it_has_freed() -> None:
    said = subprocess.run([sys.executable, "-c", _FREES], capture_output=True, text=True, check=True).stdout
    full, freed, trimmed, in_use, kept = map(eval, said.split())
    assert full > 90 * MIB
    assert freed == pytest.approx(full, abs=10 * MIB), "malloc keeps it"
    assert trimmed < 10 * MIB
    assert (in_use, kept) == (False, True)


_PAUSES = """if True:
    import asyncio, gc, sys, weakref
    from gpuserve.front.ipc import heap_memory

    class Cycle:
        def __init__(self):
            self.own = self

    def full_collections(kept):  # while as many objects come as call for four
        before = gc.get_stats()[2]["collections"]
        kept += ([] for _ in range(400_000))
        return gc.get_stats()[2]["collections"] - before

    async def until_collected(found):
        trimming = asyncio.create_task(heap_memory.trim_periodically(lambda: None))
        while not found:
            await asyncio.sleep(0.01)
        trimming.cancel()

    heap_memory.TRIM_PERIOD_S = 0.01
    gc.callbacks.append(heap_memory.pause_full_collections)
    gc.freeze()
    gc.set_threshold(*heap_memory.GC_THRESHOLDS)
    kept = []
    first, second = full_collections(kept), full_collections(kept)
    found, cycle = [], Cycle()
    of_cycle = weakref.ref(cycle, found.append)
    gc.collect(1)  # moves the cycle to the oldest generation
    del cycle
    kept.clear()
    asyncio.run(until_collected(found))
    print(first > 0, second, gc.get_threshold() == heap_memory.GC_THRESHOLDS)
"""


def test_full_collections_pause_while_there_are_many_objects_and_find_their_garbage_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", _PAUSES], capture_output=True, text=True, check=True)
    assert done.stdout == "True 0 True\n"
