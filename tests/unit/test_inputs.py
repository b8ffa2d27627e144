"""Tensors become arrays, and the word that their memory is free comes with the death of the last one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpuserve_worker.memory.arena import Arena, Mapping
from gpuserve_worker.memory.batch_tensors import InputLeases, Inputs
from gpuserve_worker.memory.client_regions import ClientRegions
from gpuserve_worker.protocol.tensor import ITEMSIZE, encode_bytes, numpy_dtype
from gpuserve_worker.protocol.wire import Ref, WireTensor

BATCH = 5


class Front:
    """An arena whose segments are mapped beside it, and what was reported to it."""

    def __init__(self) -> None:
        self.mapping = Mapping()
        self.arena = Arena(1 << 30, self.mapping.attach, lambda _: None)
        self.reported: list[int] = []
        self.leases = InputLeases(self.reported.append)
        self.inputs = Inputs(self.mapping, ClientRegions(), Mapping(), self.leases, read_only=False)

    def lend(self, array: np.ndarray[Any, Any], name: str = "x") -> WireTensor:
        block = self.arena.allocate(array.nbytes)
        block.view[:] = array.tobytes()
        return WireTensor(name, "FP32", array.shape, Ref(block.segment, block.offset, array.nbytes))

    def arrays(self, *tensors: WireTensor) -> dict[str, Any]:
        return self.inputs.arrays(BATCH, tensors)


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.mapping.close()
    front.arena.close()


@pytest.mark.parametrize("datatype", sorted(set(ITEMSIZE) - {"BYTES"}))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (1,)], ids=str)
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "arena"])
def test_every_datatype_and_shape(front: Front, datatype: str, shape: tuple[int, ...], inline: bool) -> None:
    expected = np.arange(1, 1 + int(np.prod(shape))).astype(numpy_dtype(datatype)).reshape(shape)
    tensor = WireTensor("x", datatype, shape, expected.tobytes())
    if not inline:
        tensor = front.lend(expected)._replace(datatype=datatype)
    array = front.arrays(tensor)["x"]
    assert type(array) is np.ndarray
    assert array.dtype == expected.dtype
    assert array.flags.writeable
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "arena"])
def test_byte_strings_keep_nothing(front: Front, inline: bool) -> None:
    data = encode_bytes([b"a\x00", b"", "é"])
    payload: Any = data
    if not inline:
        block = front.arena.allocate(len(data))
        block.view[:] = data
        payload = Ref(block.segment, block.offset, len(data))
    array = front.arrays(WireTensor("x", "BYTES", (3, 1), payload))["x"]
    assert array.tolist() == [[b"a\x00"], [b""], ["é".encode()]]
    assert front.leases.is_free(BATCH)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "arena"])
def test_read_only_arrays_refuse_to_be_written(front: Front, inline: bool) -> None:
    inputs = Inputs(front.mapping, ClientRegions(), Mapping(), front.leases, read_only=True)
    ones = np.ones((2, 2), np.float32)
    tensor = WireTensor("x", "FP32", (2, 2), ones.tobytes()) if inline else front.lend(ones)
    array = inputs.arrays(BATCH, (tensor,))["x"]
    with pytest.raises(ValueError, match="read-only"):
        array += 1
    assert array.tolist() == [[1, 1], [1, 1]]


def test_arrays_are_views_of_the_arena(front: Front) -> None:
    tensor = front.lend(np.zeros((2, 2), np.float32))
    front.arrays(tensor)["x"][:] = 3
    assert isinstance(tensor.payload, Ref)
    assert bytes(front.mapping.view(*tensor.payload)) == np.full(4, 3, np.float32).tobytes()


def test_free_when_every_array_died_during_the_call(front: Front) -> None:
    front.leases.begin(BATCH)
    arrays = front.arrays(front.lend(np.zeros((2, 2), np.float32)), front.lend(np.ones(3, np.float32), "y"))
    assert not front.leases.is_free(BATCH)
    del arrays
    assert front.leases.is_free(BATCH)
    front.leases.answered(BATCH)
    assert front.reported == []


KEEPERS = {
    "the array": lambda x: x,
    "a slice": lambda x: x[1:, ::2],
    "a transposed slice of a slice": lambda x: x[:, 1:][:1].T,
    "another type of element": lambda x: x.view(np.uint8)[::3],
    "one row": lambda x: x[0],
    "a flat view": lambda x: x.reshape(-1)[2:3],
    "a memoryview": memoryview,
    "an array over a memoryview": lambda x: np.asarray(memoryview(x)),
    "a flat iterator": lambda x: x.flat,
    "its base": lambda x: x.base,
    "the memory behind its base": lambda x: memoryview(x.base),
    "a broadcast": lambda x: np.broadcast_to(x[0], (9, 4)),
    "a cycle": lambda x: (cycle := [x]).append(cycle) or cycle,
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_a_block_is_held_until_the_last_array_over_it_dies(front: Front, keep: Any) -> None:
    front.leases.begin(BATCH)
    kept = [keep(front.arrays(front.lend(np.zeros((4, 4), np.float32)))["x"])]
    gc.collect()
    assert not front.leases.is_free(BATCH)
    front.leases.answered(BATCH)
    assert front.reported == []
    kept.clear()
    gc.collect()
    assert front.reported == [BATCH]


def test_one_report_a_batch_whichever_input_dies_last(front: Front) -> None:
    front.leases.begin(BATCH)
    arrays = front.arrays(front.lend(np.zeros(2, np.float32)), front.lend(np.zeros(2, np.float32), "y"))
    front.leases.answered(BATCH)
    del arrays["y"]
    assert front.reported == []
    del arrays["x"]
    assert front.reported == [BATCH]


def test_a_death_between_the_answer_and_its_sending_is_reported_after_it(front: Front) -> None:
    front.leases.begin(BATCH)
    arrays = front.arrays(front.lend(np.zeros(2, np.float32)))
    assert not front.leases.is_free(BATCH)
    del arrays
    assert front.reported == []
    front.leases.answered(BATCH)
    assert front.reported == [BATCH]


def test_another_batch_is_reported_while_one_runs(front: Front) -> None:
    front.leases.begin(BATCH)
    arrays = front.arrays(front.lend(np.zeros(2, np.float32)))
    front.leases.answered(BATCH)
    front.leases.begin(BATCH + 1)
    del arrays
    assert front.reported == [BATCH]


def test_a_death_in_another_thread(front: Front) -> None:
    front.leases.begin(BATCH)
    kept = [front.arrays(front.lend(np.zeros(2, np.float32)))]
    front.leases.answered(BATCH)
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert front.reported == [BATCH]


def test_nothing_is_reported_to_a_front_that_is_gone(front: Front) -> None:
    front.leases.begin(BATCH)
    arrays = front.arrays(front.lend(np.zeros(2, np.float32)))
    front.leases.answered(BATCH)
    front.leases.close()
    front.mapping.close()
    assert arrays["x"].sum() == 0
    del arrays
    assert front.reported == []


def test_memory_that_was_never_announced(front: Front) -> None:
    with pytest.raises(ValueError, match="segment 7"):
        front.arrays(WireTensor("x", "FP32", (1,), Ref(7, 0, 4)))


def test_a_payload_that_is_too_short_for_its_shape(front: Front) -> None:
    with pytest.raises(TypeError, match="too small"):
        front.arrays(WireTensor("x", "FP32", (3,), b"1234"))
