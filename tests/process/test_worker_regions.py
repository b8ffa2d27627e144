"""A worker over clients' regions of shared memory. The test is its front, and the clients."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaks import own_name
from worker_process import LARGE, TIMEOUT_S, WorkerProcess, floats, loaded, model, output, values

from gpuserve.core.errors import InvalidArgument, Unavailable
from gpuserve.front.ipc.shared_memory import RegionKind, RegionTable
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import decode_bytes, encode_bytes

PAGE = os.sysconf("SC_PAGE_SIZE")
NBYTES = 4 * PAGE
ROW = np.arange(4, dtype=np.float32)
BYTES_MODEL = {"inputs": (("x", "BYTES", (-1,), False),), "outputs": (("y", "BYTES", (-1,), False),)}
BOOL_MODEL = {"inputs": (("x", "BOOL", (-1,), False),), "outputs": (("y", "BOOL", (-1,), False),)}


@pytest.fixture
def file() -> Iterator[int]:
    """The memory of a client."""
    fd = os.memfd_create("client")
    os.ftruncate(fd, NBYTES)
    yield fd
    os.close(fd)


def register(worker: WorkerProcess, fd: int, number: int = 1, offset: int = 0, nbytes: int = NBYTES) -> None:
    worker.link.send(wire.Region(number, offset, nbytes), (fd,))


def run(
    worker: WorkerProcess,
    parts: Sequence[bytes | wire.Place],
    inner: int,
    datatype: str = "FP32",
    places: Sequence[wire.Place | None] | None = None,
    batch_id: int = 1,
) -> Any:
    """A batch of one row a request: gathered from bytes, and by the worker from places in regions."""
    lengths = [one.nbytes if isinstance(one, wire.Place) else len(one) for one in parts]
    gathered = b"".join(b"?" * one.nbytes if isinstance(one, wire.Place) else one for one in parts)
    tensor = worker.in_arena("x", datatype, (len(parts), inner), gathered)
    assert isinstance(tensor.payload, wire.Ref)
    fills = tuple(
        wire.Fill(n, datatype, inner, tensor.payload.segment, tensor.payload.offset + sum(lengths[:n]), one)
        for n, one in enumerate(parts)
        if isinstance(one, wire.Place)
    )
    wanted = places or [None] * len(parts)
    requests = tuple(wire.WireRequest(1, {}, (), () if one is None else (("y", one),)) for one in wanted)
    worker.link.send(wire.Run(batch_id, requests, (tensor,), fills))
    return worker.answer()


def answers(worker: WorkerProcess, done: Any, dtype: Any = np.float32) -> list[Any]:
    """The row of each request, or its failure."""
    assert isinstance(done, wire.Done), done
    each = wire.responses(done.responses or ())
    return [one if isinstance(one, wire.WireFailure) else values(worker, one[0], dtype)[0] for one in each]


def in_place(worker: WorkerProcess, nbytes: int, offset: int = 0) -> Any:
    """A batch of one request that is read where the client has it."""
    place = wire.Place(1, offset, nbytes)
    tensor = wire.WireTensor("x", "FP32", (1, nbytes // 4), place)
    worker.link.send(wire.Run(1, (wire.WireRequest(1, {}, ()),), (tensor,)))
    return worker.answer()


# ---- copied in, written out ------------------------------------------------------------------


@pytest.mark.parametrize(
    "malformed",
    [
        b"\xff\xff\xff\xff" + b"a" * 12,
        bytes(16),
        encode_bytes([b"one", b"and"]) + b"xx",
        b"\x01\0\0\0a\x01\0\0\0b\x01\0\0\0c",
        b"\x08\0\0\0" + b"a" * 8 + b"\x08\0\0\0",
        bytes(8)[:8] + b"\0" * 1000,
    ],
    ids=["too long", "too many", "too much", "one too many", "cut", "zeros"],
)
def test_malformed_byte_strings_fail_alone(file: int, malformed: bytes) -> None:
    os.pwrite(file, malformed, 0)
    with loaded(model("byte_strings.py:reverse", **BYTES_MODEL)) as worker:
        register(worker, file)
        good = encode_bytes([b"ab", b""])
        os.pwrite(file, good, PAGE)
        parts = [good, wire.Place(1, 0, len(malformed)), wire.Place(1, PAGE, len(good)), good]
        done = run(worker, parts, 2, "BYTES")
        each = wire.responses(done.responses)
        assert [isinstance(one, wire.WireFailure) for one in each] == [False, True, False, False]
        assert each[1].code == "INVALID_ARGUMENT"  # type: ignore[union-attr]
        assert "a BYTES input in shared memory is malformed: " in each[1].text  # type: ignore[union-attr]
        for one in (each[0], each[2], each[3]):
            assert isinstance(one, tuple)
            assert decode_bytes(worker.read(one[0].payload), 2) == [b"ba", b""]


def test_bytes_that_are_no_bool_fail_alone(file: int) -> None:
    os.pwrite(file, b"\0\1\2\0", 0)
    with loaded(model("echo.py:batched", **BOOL_MODEL)) as worker:
        register(worker, file)
        done = run(worker, [b"\1\0\1\0", wire.Place(1, 0, 4), b"\0\0\1\1"], 4, "BOOL")
        first, failure, last = answers(worker, done, np.bool_)
        assert failure == wire.WireFailure(
            "INVALID_ARGUMENT", "a BOOL input in shared memory holds other bytes than 0 and 1"
        )
        assert (first.tolist(), last.tolist()) == ([True, False, True, False], [False, False, True, True])


def test_the_callable_is_not_called_for_requests_that_are_all_refused(file: int) -> None:
    os.pwrite(file, b"\2" * 4, 0)
    with loaded(model("over_regions.py:never_called", **BOOL_MODEL)) as worker:
        register(worker, file)
        done = run(worker, [wire.Place(1, 0, 2), wire.Place(1, 2, 2)], 2, "BOOL")
        assert [one.code for one in answers(worker, done)] == ["INVALID_ARGUMENT"] * 2


def test_in_a_stream_a_refused_request_is_told_once_and_the_others_go_on(file: int) -> None:
    os.pwrite(file, b"\2" * 4, 0)
    with loaded(model("over_regions.py:twice", decoupled=True, **BOOL_MODEL)) as worker:
        register(worker, file)
        tensor = worker.in_arena("x", "BOOL", (2, 2), b"\1\0??")
        assert isinstance(tensor.payload, wire.Ref)
        at = tensor.payload.offset + 2
        fill = wire.Fill(1, "BOOL", 2, tensor.payload.segment, at, wire.Place(1, 0, 2))
        worker.link.send(wire.Run(1, (wire.WireRequest(1, {}, ()),) * 2, (tensor,), (fill,)))
        yields: list[Any] = []
        while isinstance(message := worker.hear(worker.link), wire.Yield):
            yields.append(wire.responses(message.responses or ()))
            worker.link.send(wire.Credit(((message.batch_id, 1),)))
        assert isinstance(message, wire.Done)
        assert [type(one[1]) for one in yields] == [wire.WireFailure, type(None), type(None)]
        assert [one[0] is None for one in yields] == [True, False, False]


def test_a_stream_of_one_refused_request_is_a_failure(file: int) -> None:
    os.pwrite(file, b"\2" * 4, 0)
    with loaded(model("over_regions.py:twice", decoupled=True, **BOOL_MODEL)) as worker:
        register(worker, file)
        tensor = worker.in_arena("x", "BOOL", (1, 2), b"??")
        assert isinstance(tensor.payload, wire.Ref)
        fill = wire.Fill(0, "BOOL", 2, *tensor.payload[:2], wire.Place(1, 0, 2))
        worker.link.send(wire.Run(1, (wire.WireRequest(1, {}, ()),), (tensor,), (fill,)))
        failed = worker.answer()
        assert isinstance(failed, wire.Failed)
        assert wire.WireFailure(*failed.failure).code == "INVALID_ARGUMENT"


# ---- a file that shrinks ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["gives_back_what_it_shrank", "reads_what_it_shrank"])
@pytest.mark.parametrize("nbytes", [NBYTES, 64 * LARGE])
def test_a_file_that_shrinks_while_the_callable_reads_it(path: str, nbytes: int) -> None:
    name = own_name()
    spelled = np.frombuffer(name.encode().ljust(64, b"\0"), np.uint8).astype(np.float32)
    shared = Path("/dev/shm") / name
    try:
        shared.write_bytes(spelled.tobytes().ljust(nbytes, b"\0"))
        with loaded(model(f"over_regions.py:{path}", read_only_inputs=True)) as worker:
            fd = os.open(shared, os.O_RDWR)
            register(worker, fd, nbytes=nbytes)
            os.close(fd)
            failed = in_place(worker, nbytes)
            assert isinstance(failed, wire.Failed), failed
            assert wire.WireFailure(*failed.failure).code == "INVALID_ARGUMENT"
            assert output(worker, worker.run([floats("x", [0, 7])], batch_id=2)).tolist() == [[0, 7]]
    finally:
        shared.unlink()


def test_an_array_over_a_region_outlives_it_and_the_file(file: int) -> None:
    os.pwrite(file, np.arange(PAGE, dtype=np.float32).tobytes(), 0)
    with loaded(model("over_regions.py:keeps", read_only_inputs=True)) as worker:
        before = worker.descriptors()
        register(worker, file)
        assert isinstance(in_place(worker, NBYTES), wire.Done)
        worker.link.send(wire.DropRegion(1))
        os.ftruncate(file, 0)
        # What was kept is there until the next one is; a number may be used again.
        other = os.memfd_create("other")
        os.ftruncate(other, NBYTES)
        register(worker, other)
        os.pwrite(other, ROW.tobytes(), PAGE)
        assert output(worker, in_place(worker, ROW.nbytes, PAGE)).tolist() == [ROW.tolist()]
        os.close(other)
        worker.link.send(wire.DropRegion(1))
        worker.run([floats("x", [7])], batch_id=2)
        assert worker.descriptors() == before


def test_another_front_knows_no_region(file: int) -> None:
    with loaded(model("echo.py:batched")) as worker:
        before = worker.descriptors()
        for epoch in range(2, 6):
            register(worker, file)
            assert output(worker, run(worker, [wire.Place(1, 0, 16)], 4)).tolist() == [[0, 0, 0, 0]]
            worker.new_front(epoch)
        assert worker.descriptors() == before


@pytest.mark.parametrize("fails", [0, 1])
def test_a_callable_that_outlives_its_front_reads_on_and_is_answered_to_nobody(file: int, fails: int) -> None:
    os.pwrite(file, np.array([5, fails], np.float32).tobytes(), 0)
    init = model("over_regions.py:outlives_its_front", read_only_inputs=True)
    with loaded(init) as worker:
        for epoch in range(2, 5):
            register(worker, file)
            tensor = wire.WireTensor("x", "FP32", (1, 2), wire.Place(1, 0, 8))
            worker.link.send(wire.Run(1, (wire.WireRequest(1, {}, ()),), (tensor,)))
            worker.new_front(epoch)
        worker.start([floats("x", [0, 0])], batch_id=7)
        worker.link.send(wire.Cancel(7, 0))
        assert worker.answer().batch_id == 7  # and nothing before


# ---- device memory ---------------------------------------------------------------------------


def test_without_cupy_or_a_device_a_cuda_region_says_why_it_cannot_be_used() -> None:
    with loaded(model("echo.py:batched")) as worker:
        worker.link.send(wire.CudaRegion(5, 0, 64, bytes(64)))
        opened = worker.hear(worker.link)
        assert isinstance(opened, wire.RegionOpened)
        assert opened.region == 5
        assert opened.problem.startswith(("the server has no cupy", "CUDA could not open its handle"))
        assert "\n" not in opened.problem
        refused, right = answers(worker, run(worker, [wire.Place(5, 0, 16), ROW.tobytes()], 4))
        assert refused.code == "INVALID_ARGUMENT"
        assert refused.text == f"a region of CUDA memory is not there: {opened.problem}"
        assert right.tolist() == ROW.tolist()
        placed, _ = answers(worker, run(worker, [ROW.tobytes()] * 2, 4, places=[wire.Place(5, 0, 16), None]))
        assert placed == refused
        worker.link.send(wire.DropRegion(5))
        assert output(worker, worker.run([floats("x", [7])], batch_id=3)).tolist() == [[7]]


# ---- device memory that cannot be opened ---------------------------------------------------------


#: No device memory anywhere has this handle.
HANDLE = bytes(range(64))


class Front:
    """A link to a worker, and the regions that are registered."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.table = RegionTable(lambda device: [self.link] if device == "cuda:0" else [])
        sock, pidfd = worker.link_socket.dup(), os.pidfd_open(worker.process.pid)
        self.link = WorkerLink("cuda:0#0", 1, sock, pidfd, 1, self._hear, lambda link, _: link.close())
        self.heard: list[wire.Message] = []

    def _hear(self, link: WorkerLink, messages: Sequence[wire.Message]) -> bool:
        self.heard += messages
        for message in messages:
            if isinstance(message, wire.RegionOpened):
                self.table.opened(link, message.region, message.problem)
        return False

    def close(self) -> None:
        self.table.close()
        self.link.close()


def test_memory_that_the_worker_cannot_open_is_refused_with_its_reason() -> None:
    async def main(worker: WorkerProcess) -> None:
        front = Front(worker)
        front.link.open()
        for name in ("g", "g", "h"):  # nothing of a refusal is left
            with pytest.raises(InvalidArgument) as refused:
                await asyncio.wait_for(front.table.register_cuda(name, HANDLE, 0, 64), TIMEOUT_S)
            text = str(refused.value)
            assert text.startswith(f"failed to register CUDA shared memory region: '{name}': ")
            assert "the server has no cupy" in text or "CUDA could not open its handle" in text
            assert front.table.status(RegionKind.CUDA) == []
        assert sum(isinstance(one, wire.RegionOpened) for one in front.heard) == 3
        front.close()

    with WorkerProcess(model("echo.py:batched")) as worker:
        while not isinstance(worker.hear(worker.boot), wire.Ready):
            pass
        asyncio.run(main(worker))


def test_a_worker_that_dies_over_it_is_told() -> None:
    async def main(worker: WorkerProcess) -> None:
        front = Front(worker)
        front.link.open()
        worker.process.kill()
        with pytest.raises(Unavailable, match="the worker that was to open the region died"):
            await asyncio.wait_for(front.table.register_cuda("g", HANDLE, 0, 64), TIMEOUT_S)
        front.close()

    with WorkerProcess(model("echo.py:batched")) as worker:
        while not isinstance(worker.hear(worker.boot), wire.Ready):
            pass
        asyncio.run(main(worker))
