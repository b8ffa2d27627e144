"""The pool of what a worker keeps on its device for others: pure bookkeeping over a runtime that counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserve_worker.cuda.device.ipc_memory import OF_THIS_PROCESS, SEGMENT_NBYTES, ExportPool
from gpuserve_worker.cuda.device.runtime import CudaError
from gpuserve_worker.protocol.wire import ExportSegment


class Memory:
    """A device's memory of so many bytes, by address."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.allocations: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.left:
            raise CudaError(2, "out of memory")
        self.left -= nbytes
        address = (len(self.allocations) + 1) << 40
        self.allocations[address] = nbytes
        return address

    def free(self, address: int) -> None:
        self.left += self.allocations.pop(address)

    def export_memory(self, address: int) -> bytes:
        return address.to_bytes(64, "little")


class Front:
    """What a front was told."""

    def __init__(self) -> None:
        self.segments: list[ExportSegment] = []

    def announce(self, segment: ExportSegment) -> None:
        self.segments.append(segment)


@pytest.fixture
def memory() -> Memory:
    return Memory(1 << 30)


def pool_of(memory: Any, limit_nbytes: int = 1 << 30) -> ExportPool:
    return ExportPool(memory, limit_nbytes)


def test_nothing_is_kept_or_allocated_before_a_front_asks(memory: Memory) -> None:
    pool, front = pool_of(memory), Front()
    assert pool.allocate(1000, front.announce) is None
    assert memory.allocations == {}
    pool.start(front.announce)
    assert [one.nbytes for one in front.segments] == [SEGMENT_NBYTES]
    assert pool.allocate(1000, front.announce) is not None
    pool.close()


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * SEGMENT_NBYTES // 2)), max_size=40))
def test_blocks_never_overlap_and_lie_in_announced_segments(steps: list[tuple[bool, int]]) -> None:
    memory, front = Memory(1 << 32), Front()
    pool = pool_of(memory, 6 * SEGMENT_NBYTES)
    pool.start(front.announce)
    lent: list[Any] = []
    for is_free, nbytes in steps:
        if is_free and lent:
            place = lent.pop(nbytes % len(lent)).place
            pool.free([(place.segment, place.offset)])
        elif (block := pool.allocate(nbytes, front.announce)) is not None:
            assert block.place.nbytes == nbytes
            lent.append(block)
        ranges = sorted((one.address, one.address + one.place.nbytes) for one in lent)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        for one in lent:
            assert one.place.offset + one.place.nbytes <= front.segments[one.place.segment].nbytes
    assert sum(one.nbytes for one in front.segments) <= 6 * SEGMENT_NBYTES
    pool.close()
    assert len(memory.allocations) == len(front.segments)  # others may have them open
    assert all(OF_THIS_PROCESS[one.handle] in memory.allocations for one in front.segments)


def test_where_there_is_no_memory_nothing_is_kept(memory: Memory) -> None:
    memory.left = SEGMENT_NBYTES
    pool, front = pool_of(memory), Front()
    pool.start(front.announce)
    assert pool.allocate(SEGMENT_NBYTES, front.announce) is not None
    assert pool.allocate(1, front.announce) is None
    pool.close()
    empty = pool_of(Memory(0))
    empty.start(front.announce)
    assert empty.allocate(1, front.announce) is None


def test_memory_that_cannot_be_exported_is_freed(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(address: int) -> bytes:
        raise CudaError(801, "operation not supported")

    monkeypatch.setattr(memory, "export_memory", unsupported)
    pool, front = pool_of(memory), Front()
    pool.start(front.announce)
    assert (front.segments, memory.allocations) == ([], {})
    assert pool.allocate(1, front.announce) is None


def test_a_device_that_is_gone_is_told(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(nbytes: int) -> int:
        raise CudaError(719, "unspecified launch failure")

    monkeypatch.setattr(memory, "allocate", gone)
    with pytest.raises(CudaError):
        pool_of(memory).start(Front().announce)


def test_what_a_dead_front_had_is_never_used_again(memory: Memory) -> None:
    pool, first, second = pool_of(memory), Front(), Front()
    pool.start(first.announce)
    lost = pool.allocate(SEGMENT_NBYTES // 2, first.announce)
    pool.withdraw(first.announce)
    assert pool.allocate(1, first.announce) is None  # a batch of the dead front's is at its end
    pool.start(second.announce)
    pool.withdraw(first.announce)  # which is over
    assert second.segments == first.segments
    kept = pool.allocate(SEGMENT_NBYTES // 2, second.announce)
    assert lost is not None
    assert kept is not None
    assert kept.address != lost.address
    with pytest.raises(KeyError):
        pool.free([(lost.place.segment, lost.place.offset)])
    pool.free([(kept.place.segment, kept.place.offset)])
    pool.close()


def test_what_is_not_lent_cannot_be_given_back(memory: Memory) -> None:
    pool, front = pool_of(memory), Front()
    pool.start(front.announce)
    with pytest.raises(KeyError):
        pool.free([(0, 0)])
    pool.close()
