"""Traces on their way into files: the events, files that are JSON at any time, bounded queues and streams."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import struct
import threading
from pathlib import Path

import pytest

from gpuserve.front.models.model_driver import ModelDriver
from gpuserve.front.models.model_tracer import MAX_STREAM_NBYTES, MAX_TENSOR_NBYTES, ModelTracer, trace_ids
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.observability.tracing import trace_writers
from gpuserve.front.observability.tracing.request_trace import Trace, TracedTensor
from gpuserve.front.observability.tracing.trace_settings import Sampler, TraceLevel, TraceValues
from gpuserve.front.observability.tracing.trace_writers import TraceFileWriter, TraceSink, events
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor, OutputTensor
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

TIMEOUT_S = 10.0


def trace(
    number: int, scope: str = "", frequency: int = 0, level: TraceLevel = TraceLevel.TIMESTAMPS
) -> Trace:
    made = Trace(number, "m", 1, "", level, scope, frequency, None)
    made.note("REQUEST_END", 2)
    made.note("REQUEST_START", 1)
    return made


def ids(path: Path) -> list[int]:
    return [one["id"] for one in json.loads(path.read_text()) if "model_name" in one]


def test_the_events_of_a_trace_and_of_what_it_led_to() -> None:
    parent, child = trace(1), trace(2)
    parent.request_id, child.parent_id = '"7"', 1
    parent.children.append(child)
    moments = [{"name": "REQUEST_START", "ns": 1}, {"name": "REQUEST_END", "ns": 2}]
    assert json.loads(f"[{events(parent)}]") == [
        {"id": 1, "model_name": "m", "model_version": 1, "request_id": '"7"'},
        {"id": 1, "timestamps": moments},
        {"id": 2, "model_name": "m", "model_version": 1, "parent_id": 1},
        {"id": 2, "timestamps": moments},
    ]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "cut", "text"),
    [
        ("FP32", (1, 2), struct.pack("<2f", 0.5, -1), False, "0.5,-1.0"),
        ("INT64", (2,), struct.pack("<2q", 1, -(2**40)), False, "1,-1099511627776"),
        ("BOOL", (2,), b"\1\0", False, "True,False"),
        ("BF16", (1,), b"\x80\x3f", False, "1.0"),
        ("BYTES", (2,), b"\2\0\0\0ab\1\0\0\0\xff", False, '"ab","\ufffd"'),
        ("BYTES", (2,), b"\2\0\0\0ab\1\0\0", True, '"ab",…'),
        ("INT16", (9,), b"\1\0\2", True, "1,…"),
    ],
)
def test_tensors(datatype: str, shape: tuple[int, ...], data: bytes, cut: bool, text: str) -> None:
    one = trace(1, level=TraceLevel.TENSORS)
    one.tensors.append(TracedTensor("TENSOR_QUEUE_INPUT", "x", datatype, shape, data, cut))
    (_, event) = json.loads(f"[{events(one)}]")
    expected = {"name": "x", "data": text, "shape": ",".join(map(str, shape)), "dtype": datatype}
    assert event == {"id": 1, "activity": "TENSOR_QUEUE_INPUT", "tensor": expected}


def all_ids(folder: Path) -> dict[str, list[int]]:
    return {path.name: ids(path) for path in folder.iterdir()}


def test_one_file_is_json_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("of another server")
    writer = TraceFileWriter(str(path), continues=False)
    for number in range(1, 4):
        writer.write([trace(number)])
        assert ids(path) == list(range(1, number + 1))
    writer.close()


def test_so_many_traces_a_file(tmp_path: Path) -> None:
    writer = TraceFileWriter(str(tmp_path / "t"), continues=False)
    writer.write([trace(number, frequency=2) for number in range(1, 4)])
    writer.write([trace(9, "own", 1), trace(4, frequency=2), trace(5)])
    writer.close()
    assert all_ids(tmp_path) == {"t": [5], "t.0": [1, 2], "t.1": [3, 4], "t.2": [9]}


def test_a_successor_writes_on(tmp_path: Path) -> None:
    for epoch in (1, 2):
        writer = TraceFileWriter(str(tmp_path / "t"), continues=epoch > 1)
        writer.write([trace(epoch), trace(epoch + 10, frequency=1)])
        writer.close()
    assert all_ids(tmp_path) == {"t": [1, 2], "t.0": [11], "t.1": [12]}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


class Disk:
    """A disk that has so many bytes ``left``, behind ``os.pwrite``; what is there may be written again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: float = math.inf
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, fd: int, data: memoryview, position: int) -> int:
        before = os.fstat(fd).st_size
        room = max(0, before - position) + self.left
        if not room:
            raise OSError(errno.ENOSPC, "no space left on device")
        nbytes = self._pwrite(fd, data[: int(min(room, len(data)))], position)
        self.left -= max(0, os.fstat(fd).st_size - before)
        return nbytes


def test_a_file_on_a_full_disk_stays_json_and_goes_on(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "t"
    writer = TraceFileWriter(str(path), continues=False)
    writer.write([trace(1)])
    for disk.left in (0, 1, 70):
        with pytest.raises(OSError, match="no space"):
            writer.write([trace(2), trace(3)])
        assert ids(path) == [1]
    disk.left = math.inf
    writer.write([trace(4)])
    assert ids(path) == [1, 4]
    writer.close()


def test_the_first_trace_on_a_full_disk_leaves_an_empty_array_or_no_file(tmp_path: Path, disk: Disk) -> None:
    writer = TraceFileWriter(str(tmp_path / "t"), continues=True)
    disk.left = 0
    for _ in range(3):
        with pytest.raises(OSError, match="no space"):
            writer.write([trace(1, frequency=1)])
    assert not list(tmp_path.iterdir())
    disk.left = 30
    with pytest.raises(OSError, match="no space"):
        writer.write([trace(1)])
    assert ids(tmp_path / "t") == []
    disk.left = math.inf
    writer.write([trace(2), trace(3, frequency=1)])
    assert all_ids(tmp_path) == {"t": [2], "t.0": [3]}
    writer.close()


class Held:
    """A writer that is as slow as it is told to be."""

    def __init__(self, fails: bool = False) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.ids: list[int] = []
        self._fails = fails

    def write(self, traces: list[Trace]) -> None:
        self.began.set()
        assert self.go_on.wait(TIMEOUT_S)
        if self._fails:
            raise OSError("disk full")
        self.ids += [one.id for one in traces]

    def close(self) -> None:
        self.ids.append(-1)


def test_what_finds_the_queue_full_or_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_writers, "MAX_TRACES", 2)
    for fails, told, ids_ in (
        (False, "dropped 2 traces", [1, 2, 3, -1]),
        (True, "failed to write traces: disk full", [-1]),
    ):
        writer = Held(fails)
        sink = TraceSink(lambda writer=writer: writer)
        sink.open()
        sink.put(trace(1))
        assert writer.began.wait(TIMEOUT_S)
        for number in range(2, 6):
            sink.put(trace(number))
        writer.go_on.set()
        with caplog.at_level(logging.WARNING):
            sink.close(TIMEOUT_S)
        assert writer.ids == ids_
        assert told in caplog.text


SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "UINT8", (-1,)),),
    (TensorSpec("y", "UINT8", (-1,)),),
    0,
    (InstanceSpec("cpu#0", "cpu", {}),),
    decoupled=True,
)


async def test_a_stream_that_goes_on_for_ever_is_noted_up_to_a_limit() -> None:
    traces: list[Trace] = []
    heard: list[InferResponse] = []
    responses = 3 * MAX_STREAM_NBYTES // MAX_TENSOR_NBYTES
    driver = ModelDriver(SPEC, 1 << 20, ModelMetrics("m", "1", dict))
    sampler = Sampler(TraceValues(TraceLevel.TENSORS.value, 1, -1, 0))
    driver.tracer = ModelTracer(SPEC, sampler, "", trace_ids(1), set(), traces.append, follows_callers=False)
    asked = InferRequest("m", "", "", {}, [InputTensor("x", "UINT8", (1,), b"1")], (), None)
    pending = driver.submit(asked, heard.append)
    assert pending.on_response is not None
    output = OutputTensor("y", "UINT8", (MAX_TENSOR_NBYTES,), bytes(MAX_TENSOR_NBYTES))
    for _ in range(responses):
        pending.on_response(InferResponse("m", "1", "", {}, [output]))
    driver.close()
    await asyncio.sleep(0)
    assert len(heard) == responses
    (trace,) = traces
    assert not driver.tracer.live, "later batches are not looked at"
    assert MAX_STREAM_NBYTES - MAX_TENSOR_NBYTES < trace.nbytes < MAX_STREAM_NBYTES + MAX_TENSOR_NBYTES
