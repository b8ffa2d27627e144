"""Tensors in clients' device memory, over both protocols."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_exporter import TIMEOUT_S, DeviceMemory, Exporter
from cuda_server import (
    MIB,
    client_of,
    infer,
    infer_input,
    into,
    model,
    protocol_of,
    registered,
    running,
    serve,
    tensor,
    texts,
)
from gpu_machine import GpuMachine, RealMachine
from numpy.typing import NDArray
from processes import wait_until
from serving import Addresses
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
#: As gRPC and HTTP have it.
OWN_DOING = {"StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND", "400", "404"}
FAILED = "failed to register CUDA shared memory region: 'bad'"


def models(gate: Path) -> list[dict[str, Any]]:
    gpu, host = [tensor("x", "FP32", -1, memory="gpu")], [tensor("x", "FP32", -1)]
    y, number = [tensor("y", "FP32", -1)], [tensor("y", "INT64", 1)]
    return [
        model("host", "twice", host, y, batching={"max_queue_delay_us": 20_000}),
        model("device", "twice", gpu, y, batching={"max_queue_delay_us": 20_000}),
        model("to_host", "twice_on_host", gpu, y),
        model("to_device", "twice_on_device", host, y),
        model("address", "address", gpu, number, read_only_inputs=True),
        model("before", "before", gpu, [tensor("y", "FP32", 1)], read_only_inputs=True),
        model("bools", "inverse", [tensor("x", "BOOL", -1, memory="gpu")], [tensor("y", "BOOL", -1)]),
        model("strings", "as_it_is", [tensor("x", "BYTES", -1)], [tensor("y", "BYTES", -1)]),
        model("gated", "Gated", gpu, y, kwargs={"path": str(gate)}),
        model("pair", "process", gpu, [*y, tensor("pid", "INT64", 1)], count=2),
    ]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FIFO: for each byte in it the model ``gated`` runs a batch."""
    path = tmp_path_factory.mktemp("gate") / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def server(
    shared_gpu_machine: GpuMachine | RealMachine, tmp_path_factory: pytest.TempPathFactory, gate: Path
) -> Iterator[Addresses]:
    with serve(shared_gpu_machine, tmp_path_factory.mktemp("server"), models(gate)) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def exporter(shared_gpu_machine: GpuMachine | RealMachine) -> Iterator[Exporter]:
    with Exporter(shared_gpu_machine.environ) as one:
        yield one


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: Addresses) -> Iterator[Any]:
    with client_of(request.param, server) as one:
        yield one
        one.unregister_cuda_shared_memory()


# ---- data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host", "device", "to_host", "to_device"])
@pytest.mark.parametrize("columns", [4, 300_000])
def test_inputs_are_read_from_and_outputs_written_to_device_memory(
    client: Any, exporter: Exporter, name: str, columns: int
) -> None:
    x = np.arange(2 * columns, dtype=np.float32).reshape(2, columns)
    given, wanted = exporter.make(x.nbytes + 64), exporter.make(x.nbytes + 128)
    given.put(x.tobytes(), 64)
    with registered(client, "in", given), registered(client, "out", wanted):
        inputs = [infer_input(client, x, "FP32", "in", 64)]
        infer(client, name, inputs, [into(client, "out", x.nbytes + 28, 100)])
        assert wanted.get(x.nbytes, 100) == (x * 2).tobytes()
        assert wanted.get(100) == bytes(100)
        assert wanted.get(28, 100 + x.nbytes) == bytes(28)
        assert infer(client, name, inputs).as_numpy("y").tolist() == (x * 2).tolist()
        wanted.put(bytes(x.nbytes))
        infer(client, name, [infer_input(client, x, "FP32")], [into(client, "out", x.nbytes)])
        assert wanted.get(x.nbytes) == (x * 2).tobytes()


@pytest.mark.parametrize("name", ["host", "device"])
def test_rows_from_device_memory_are_joined_with_those_of_messages(
    server: Addresses, exporter: Exporter, name: str
) -> None:
    rows = [np.full((1, 20_000), number, np.float32) for number in range(6)]
    memory = exporter.make(6 * rows[0].nbytes)
    for number, row in enumerate(rows):
        memory.put(row.tobytes(), number * row.nbytes)

    def ask(number: int) -> NDArray[Any]:
        with client_of("grpc", server) as one:
            row = rows[number]
            where = ("in", number * row.nbytes) if number % 2 else ()
            answer: NDArray[Any] = infer(one, name, [infer_input(one, row, "FP32", *where)]).as_numpy("y")
            return answer

    with client_of("grpc", server) as client, registered(client, "in", memory), ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            answers = list(pool.map(ask, range(6)))
            for row, answer in zip(rows, answers, strict=True):
                np.testing.assert_array_equal(answer, row * 2)


def test_what_is_read_is_what_was_there_when_the_request_came(client: Any, exporter: Exporter) -> None:
    memory, out = exporter.make(MIB), exporter.make(MIB)
    with registered(client, "in", memory), registered(client, "out", out):
        for value in range(1, 6):
            x = np.full((1, MIB // 4), value, np.float32)
            memory.put(x.tobytes())
            infer(client, "device", [infer_input(client, x, "FP32", "in")], [into(client, "out", x.nbytes)])
            memory.put(bytes(x.nbytes))  # it is the client's again
            assert out.get(x.nbytes) == (x * 2).tobytes()


def test_an_aligned_read_only_input_is_read_where_it_is(client: Any, exporter: Exporter) -> None:
    memory = exporter.make(4096)
    with registered(client, "in", memory):

        def address(offset: int) -> int:
            inputs = [infer_input(client, ROWS[:1], "FP32", "in", offset)]
            return int(infer(client, "address", inputs).as_numpy("y")[0, 0])

        assert address(512) - address(0) == 512
        assert address(512 + 4) - address(0) != 512 + 4, "what is not aligned is copied"


def test_an_array_that_is_kept_outlives_the_region(client: Any, exporter: Exporter) -> None:
    memory = exporter.make(4096)
    memory.put(ROWS.tobytes())
    with registered(client, "in", memory):
        infer(client, "before", [infer_input(client, ROWS, "FP32", "in")])
    kept = infer(client, "before", [infer_input(client, ROWS, "FP32")]).as_numpy("y")
    assert kept.tolist() == ROWS.sum(axis=1, keepdims=True).tolist()


def test_bools_are_looked_at(client: Any, exporter: Exporter) -> None:
    memory = exporter.make(64)
    x = np.array([[True, False, False, True]])
    memory.put(x.tobytes())
    memory.put(b"\1\2\0\1", 16)
    with registered(client, "in", memory), registered(client, "out", out := exporter.make(64)):
        infer(client, "bools", [infer_input(client, x, "BOOL", "in")], [into(client, "out", 4)])
        assert out.get(4) == (~x).tobytes()
        with pytest.raises(InferenceServerException, match="a BOOL input in shared memory holds other bytes"):
            infer(client, "bools", [infer_input(client, x, "BOOL", "in", 16)])


def test_byte_strings_go_by_way_of_the_host(client: Any, exporter: Exporter) -> None:
    x = np.array([[b"", b"a\0b", b"c" * 70_000]], dtype=object)
    data = serialize_byte_tensor(x).item()
    memory, out = exporter.make(len(data)), exporter.make(len(data))
    memory.put(data)
    with registered(client, "in", memory), registered(client, "out", out):
        given = infer_input(client, x, "BYTES", "in", 0, len(data))
        infer(client, "strings", [given], [into(client, "out", len(data))])
        assert out.get(len(data)) == data
        memory.put(b"\xff\xff\xff\xff")
        with pytest.raises(InferenceServerException, match="a BYTES input in shared memory is malformed"):
            infer(client, "strings", [given])


def test_an_output_that_does_not_fit_is_refused(client: Any, exporter: Exporter) -> None:
    out = exporter.make(64)
    with registered(client, "out", out):
        for name in ("device", "host"):
            with pytest.raises(InferenceServerException, match=r"\(31 bytes\) should be at least 32 bytes"):
                infer(client, name, [infer_input(client, ROWS, "FP32")], [into(client, "out", 31)])
        assert out.get(64) == bytes(64)


# ---- names --------------------------------------------------------------------------------------


def test_status_and_unregistration(client: Any, exporter: Exporter) -> None:
    memory = exporter.make(128)
    with registered(client, "a", memory), registered(client, "b", memory, 64):
        assert texts(client) == {"a": (0, 128), "b": (0, 64)}
        with pytest.raises(InferenceServerException, match="shared memory region 'a' already in manager"):
            client.register_cuda_shared_memory("a", memory.handle_base64, 0, 128)
        with pytest.raises(InferenceServerException, match="registered as CUDA shared memory, not system"):
            client.unregister_system_shared_memory("a")
    assert texts(client) == {}
    client.unregister_cuda_shared_memory("a")


def test_one_handle_by_two_names_is_open_until_both_are_gone(client: Any, exporter: Exporter) -> None:
    memory = exporter.make(64)
    memory.put(ROWS.tobytes())
    with registered(client, "a", memory):
        with registered(client, "b", memory):
            for name in ("a", "b"):
                answer = infer(client, "device", [infer_input(client, ROWS, "FP32", name)])
                assert answer.as_numpy("y").tolist() == (ROWS * 2).tolist()
        answer = infer(client, "device", [infer_input(client, ROWS, "FP32", "a")])
        assert answer.as_numpy("y").tolist() == (ROWS * 2).tolist()
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'a'"):
        infer(client, "device", [infer_input(client, ROWS, "FP32", "a")])


def test_every_worker_of_the_device_opens_it_when_it_needs_it(client: Any, exporter: Exporter) -> None:
    memory = exporter.make(64)
    memory.put(ROWS.tobytes())
    with registered(client, "in", memory):
        pids = set()
        for _ in range(6):
            answer = infer(client, "pair", [infer_input(client, ROWS, "FP32", "in")])
            assert answer.as_numpy("y").tolist() == (ROWS * 2).tolist()
            pids.add(int(answer.as_numpy("pid")[0, 0]))
        assert len(pids) == 2


def test_a_region_in_use_is_let_go_when_its_request_is_through(
    server: Addresses, client: Any, exporter: Exporter, gate: Path
) -> None:
    memory, out = exporter.make(64), exporter.make(64)
    memory.put(ROWS.tobytes())
    given, wanted = [infer_input(client, ROWS, "FP32", "in")], [into(client, "out", 32)]
    with registered(client, "in", memory), registered(client, "out", out), ThreadPoolExecutor(1) as pool:
        with client_of(protocol_of(client), server) as other:
            asked = pool.submit(infer, other, "gated", given, wanted)
            wait_until(lambda: running(server, "gated") == 1, "the request runs", TIMEOUT_S)
            client.unregister_cuda_shared_memory("in")
            client.unregister_cuda_shared_memory("out")
            assert set(texts(client)) == {"in", "out"}
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'in'"):
                infer(client, "device", given)
            gate.write_bytes(b"!")
            asked.result(TIMEOUT_S)
        assert out.get(32) == (ROWS * 2).tobytes()
        wait_until(lambda: texts(client) == {}, "the regions are gone", TIMEOUT_S)


def test_registering_and_unregistering_while_requests_run(server: Addresses, exporter: Exporter) -> None:
    memory = exporter.make(64)
    memory.put(ROWS.tobytes())
    expected = (ROWS * 2).tolist()

    def ask(number: int) -> list[Any]:
        """What became of each of some requests: the answer, or what the refusal said."""
        with client_of("grpc", server) as one:
            return [outcome(one, "device", [infer_input(one, ROWS, "FP32", "in")]) for _ in range(20)]

    with client_of("grpc", server) as client, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, number) for number in range(4)]
        while not all(one.done() for one in asked):
            if not texts(client):  # else requests still use it, and it keeps its name
                _register(client, "in", memory)
            client.unregister_cuda_shared_memory("in")
        for one in asked:
            for found in one.result():
                assert found == expected or "Unable to find shared memory region: 'in'" in found
        wait_until(lambda: texts(client) == {}, "the region is gone", TIMEOUT_S)
        with registered(client, "in", memory):
            assert ask(0) == [expected] * 20
        assert texts(client) == {}


# ---- bad input ----------------------------------------------------------------------------------


def test_handles_that_are_none(client: Any, exporter: Exporter) -> None:
    good = exporter.make(64)
    for handle in (bytes(64), bytes(range(64)), good.handle[::-1], b"\xff" * 64):
        with pytest.raises(InferenceServerException) as caught:
            client.register_cuda_shared_memory("bad", base64.b64encode(handle), 0, 64)
        assert str(caught.value.message()).startswith(f"{FAILED}: CUDA could not open its handle: ")
    for handle in (good.handle[:63], good.handle + b"\0", b""):
        with pytest.raises(InferenceServerException, match="cudaIpcMemHandle_t"):
            client.register_cuda_shared_memory("bad", base64.b64encode(handle), 0, 64)
    assert texts(client) == {}
    _still_serves(client, good)


@pytest.mark.parametrize("nbytes", [0, 65 * MIB, (1 << 63) - 1])
def test_sizes_that_the_allocation_does_not_have(client: Any, exporter: Exporter, nbytes: int) -> None:
    good = exporter.make(64)
    with pytest.raises(InferenceServerException) as caught:
        client.register_cuda_shared_memory("bad", good.handle_base64, 0, nbytes)
    assert str(caught.value.message()).startswith(FAILED)
    assert str(nbytes) in str(caught.value.message())
    assert texts(client) == {}
    _still_serves(client, good)


def test_places_outside_of_the_region(client: Any, exporter: Exporter) -> None:
    good = exporter.make(64)
    with registered(client, "in", good):
        for offset, nbytes in ((33, 32), (64, 32), (1 << 40, 32)):
            given = infer_input(client, ROWS, "FP32", "in", offset, nbytes)
            with pytest.raises(InferenceServerException, match="Invalid offset"):
                infer(client, "device", [given])
            with pytest.raises(InferenceServerException, match="Invalid offset"):
                infer(
                    client,
                    "device",
                    [infer_input(client, ROWS, "FP32")],
                    [into(client, "in", nbytes, offset)],
                )
    _still_serves(client, good)


def test_devices_that_there_are_not(client: Any, exporter: Exporter) -> None:
    good = exporter.make(64)
    with pytest.raises(InferenceServerException, match="expected the 'device_id' of cuda:0"):
        client.register_cuda_shared_memory("bad", good.handle_base64, 7, 64)
    _still_serves(client, good)


def test_the_handle_of_memory_that_is_gone(client: Any, shared_gpu_machine: GpuMachine | RealMachine) -> None:
    """Each by itself: CUDA cuts small ones out of blocks of 2 MiB, which stay while one of them does."""
    with Exporter(shared_gpu_machine.environ) as gone:
        freed, kept = gone.make(4 * MIB), gone.make(4 * MIB)
        freed.free()
        with pytest.raises(InferenceServerException, match=FAILED):
            client.register_cuda_shared_memory("bad", freed.handle_base64, 0, 64)
    with pytest.raises(InferenceServerException, match=FAILED):
        client.register_cuda_shared_memory("bad", kept.handle_base64, 0, 64)
    assert texts(client) == {}


@pytest.mark.thorough
def test_an_exporter_that_ends_spoils_nothing_but_its_own(
    client: Any, exporter: Exporter, shared_gpu_machine: GpuMachine | RealMachine
) -> None:
    """What is open stays open; a worker that has not opened it yet cannot any more."""
    good = exporter.make(64)
    with Exporter(shared_gpu_machine.environ) as leaving:
        memory = leaving.make(64)
        memory.put(ROWS.tobytes())
        _register(client, "in", memory)
        for _ in range(2):
            infer(client, "device", [infer_input(client, ROWS, "FP32", "in")])
    for name in ("device", "to_host", "host"):
        found = outcome(client, name, [infer_input(client, ROWS, "FP32", "in")])
        assert found == (ROWS * 2).tolist() or "a region of CUDA memory is not there: " in found
    client.unregister_cuda_shared_memory("in")
    _still_serves(client, good)


# ---- inside -------------------------------------------------------------------------------------


def outcome(client: Any, name: str, inputs: list[Any]) -> Any:
    """The output of a request, or why there is none, which is its client's own doing."""
    try:
        return infer(client, name, inputs).as_numpy("y").tolist()
    except InferenceServerException as error:
        return str(error) if error.status() in OWN_DOING else f"not the client's doing: {error}"


def _register(client: Any, name: str, memory: DeviceMemory) -> None:
    client.register_cuda_shared_memory(name, memory.handle_base64, 0, memory.nbytes)


def _still_serves(client: Any, memory: DeviceMemory) -> None:
    memory.put(ROWS.tobytes())
    with registered(client, "good", memory):
        answer = infer(client, "device", [infer_input(client, ROWS, "FP32", "good")])
        assert answer.as_numpy("y").tolist() == (ROWS * 2).tolist()
