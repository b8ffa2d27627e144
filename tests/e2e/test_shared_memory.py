"""Tensors in clients' shared memory, as tritonclient uses it, over both protocols."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from client_regions import got, in_region, into_region, library, listed, memory, put, raw, region
from config_file import DATATYPES, model, models, served, tensor
from processes import wait_until
from sending import Sender
from serving import Addresses
from test_v2_inference import CLIENTS, CONTENTS, by_json, by_stub, sample, url
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

MIB = 1 << 20
ECHO = "echo_FP32"
ANOTHER = 54321
ROW = np.arange(4, dtype=np.float32).reshape(1, 4)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FIFO: for each byte in it the model ``gated`` runs a batch."""
    # What Python itself starts for the first shared memory of a process, and keeps.
    resource_tracker.ensure_running()
    path = tmp_path_factory.mktemp("gate") / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, gate: Path) -> Iterator[Addresses]:
    """The usual models, one that never writes to its inputs, and one that waits for the gate."""
    folder = tmp_path_factory.mktemp("server")
    x, y = [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)]
    gated = model("gated", "Gate", [tensor("x", "INT32", 1)], [tensor("seen", "BYTES", 1)], 4)
    made = [
        *models(*(f"echo_{datatype}" for datatype in DATATYPES), "parameters"),
        model("still", "echo", x, y, 64, read_only_inputs=True),
        {**gated, "kwargs": {"path": str(gate)}},
    ]
    with served(folder, made) as addresses:
        yield addresses


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, server: Addresses) -> Iterator[Any]:
    """A client of either protocol; no region outlives a test."""
    with CLIENTS[request.param].InferenceServerClient(url(server, request.param)) as made:
        yield made
        made.unregister_system_shared_memory()
        assert listed(made) == {}


# ---- tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_in_and_out(client: Any, datatype: str) -> None:
    x = sample(datatype)
    data = raw(x)
    with region(client, "in", len(data) + 8) as given, region(client, "out", len(data) + 24) as answered:
        put(given, data, 8)
        result = client.infer(
            f"echo_{datatype}",
            [in_region(client, x, datatype, len(data), 8)],
            outputs=[into_region(client, len(data) + 8, 16)],
        )
        assert got(answered, len(data), 16) == data
        assert got(answered, 16) == bytes(16)
        told = result.get_output("y")
        if isinstance(told, dict):
            assert told == {"name": "y", "datatype": datatype, "shape": list(x.shape)}
        else:
            assert (told.datatype, list(told.shape)) == (datatype, list(x.shape))
            assert list(result.get_response().raw_output_contents) == [b""]


@pytest.mark.parametrize("datatype", [one for one in DATATYPES if one not in {"FP16", "BF16"}])
def test_the_same_tensor_by_every_way_is_the_same_bytes(server: Addresses, datatype: str) -> None:
    """JSON, HTTP binary, gRPC contents, gRPC raw, shared memory."""
    x = sample(datatype)
    if datatype.startswith("FP"):
        x[~np.isfinite(x)] = 1.5
    if datatype == "BYTES":
        x = np.array([["a", "", "é\0", "x" * 300]], dtype=object)
        x = np.char.encode(x.astype(str), "utf-8").astype(object)
    data, name = raw(x), f"echo_{datatype}"
    elements = [one.decode() for one in x.ravel()] if datatype == "BYTES" else x.ravel().tolist()
    wanted = {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    one = {"name": "x", "datatype": datatype, "shape": x.shape}
    answers = {}
    headers, body = by_json(server, name, {"inputs": [{**one, "data": elements}], **wanted})
    answers["json"] = body[int(headers["Inference-Header-Content-Length"]) :]
    for protocol, client_library in CLIENTS.items():
        with client_library.InferenceServerClient(url(server, protocol)) as client:
            given = client_library.InferInput("x", list(x.shape), datatype)
            given.set_data_from_numpy(x)
            answers[f"{protocol} raw"] = raw(client.infer(name, [given]).as_numpy("y"))
            with region(client, "in", len(data)) as handle, region(client, "out", len(data)) as answered:
                put(handle, data)
                inputs = [in_region(client, x, datatype, len(data))]
                client.infer(name, inputs, outputs=[into_region(client, len(data))])
                answers[f"{protocol} shared memory"] = got(answered, len(data))
    request = service_pb2.ModelInferRequest(model_name=name)
    sent = request.inputs.add(name="x", datatype=datatype, shape=x.shape)
    getattr(sent.contents, CONTENTS[datatype]).extend(x.ravel().tolist())
    answers["contents"] = by_stub(server, request).raw_output_contents[0]
    assert answers == dict.fromkeys(answers, data)


@pytest.mark.parametrize("name", [ECHO, "still"])
@pytest.mark.parametrize("nbytes", [64, MIB, 16 * MIB])
def test_sizes(client: Any, name: str, nbytes: int) -> None:
    x = np.random.default_rng(nbytes).random((1, nbytes // 4), dtype=np.float32)
    with region(client, "in", nbytes) as given, region(client, "out", nbytes) as answered:
        put(given, x.tobytes())
        client.infer(name, [in_region(client, x, "FP32", nbytes)], outputs=[into_region(client, nbytes)])
        assert got(answered, nbytes) == x.tobytes()
        assert got(given, nbytes) == x.tobytes()


def test_only_the_input_or_only_the_output(client: Any) -> None:
    nbytes = ROW.nbytes
    with region(client, "in", nbytes) as given, region(client, "out", nbytes) as answered:
        put(given, ROW.tobytes())
        inputs = [in_region(client, ROW, "FP32", nbytes)]
        assert client.infer(ECHO, inputs).as_numpy("y").tolist() == ROW.tolist()
        own = library(client).InferInput("x", [1, 4], "FP32")
        own.set_data_from_numpy(ROW + 1)
        client.infer(ECHO, [own], outputs=[into_region(client, nbytes)])
        assert got(answered, nbytes) == (ROW + 1).tobytes()


def test_one_region_in_many_requests_at_once(client: Any) -> None:
    nbytes = ROW.nbytes
    with region(client, "in", 8 * nbytes) as given, region(client, "out", 8 * nbytes) as answered:
        rows = np.arange(32, dtype=np.float32).reshape(8, 4)
        put(given, rows.tobytes())

        def ask(number: int) -> None:
            with CLIENTS_OF[library(client)](client) as own:
                at = number % 8 * nbytes
                inputs = [in_region(client, ROW, "FP32", nbytes, at)]
                own.infer(ECHO, inputs, outputs=[into_region(client, nbytes, at)])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(40)))
        assert got(answered, 8 * nbytes) == rows.tobytes()


@contextlib.contextmanager
def _again(client: Any) -> Iterator[Any]:
    """A gRPC client may be used by many threads, an HTTP one by one."""
    yield client


@contextlib.contextmanager
def _another(client: Any) -> Iterator[Any]:
    with tritonclient.http.InferenceServerClient(client._parsed_url.netloc) as made:
        yield made


CLIENTS_OF = {tritonclient.grpc: _again, tritonclient.http: _another}


def test_in_a_stream(server: Addresses) -> None:
    nbytes = ROW.nbytes
    answers: queue.Queue[Any] = queue.Queue()
    with (
        tritonclient.grpc.InferenceServerClient(server.grpc) as client,
        region(client, "in", nbytes) as given,
        region(client, "out", nbytes) as answered,
    ):
        put(given, ROW.tobytes())
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = [in_region(client, ROW, "FP32", nbytes)]
        client.async_stream_infer(ECHO, inputs, outputs=[into_region(client, nbytes)])
        _, error = answers.get(timeout=10)
        assert error is None
        assert got(answered, nbytes) == ROW.tobytes()
        client.unregister_system_shared_memory("in")
        client.async_stream_infer(ECHO, inputs)
        _, error = answers.get(timeout=10)
        assert str(error) == "Unable to find shared memory region: 'in'"
        client.stop_stream()


# ---- registration ------------------------------------------------------------------------


def test_regions_are_listed(client: Any) -> None:
    with memory(8192) as (_, key):
        client.register_system_shared_memory("a", key, 4096)
        client.register_system_shared_memory("b", key, 4096, offset=4096)
        assert listed(client) == {"a": (key, 0, 4096), "b": (key, 4096, 4096)}
        status = client.get_system_shared_memory_status("b")
        assert len(status if isinstance(status, list) else status.regions) == 1
        with pytest.raises(InferenceServerException, match="shared memory region 'a' already in manager"):
            client.register_system_shared_memory("a", key, 4096)
        client.unregister_system_shared_memory("a")
        assert listed(client) == {"b": (key, 4096, 4096)}
    client.unregister_system_shared_memory("none such")


def test_regions_of_both_protocols_are_the_same(server: Addresses) -> None:
    with (
        tritonclient.grpc.InferenceServerClient(server.grpc) as one,
        tritonclient.http.InferenceServerClient(server.http) as other,
        region(one, "é and space", 64),
    ):
        assert listed(one) == listed(other)
        other.unregister_system_shared_memory("é and space")
        assert listed(one) == {}


@pytest.mark.parametrize(
    ("key", "offset", "nbytes", "text"),
    [
        ("/gpuserve-no-such", 0, 64, "Unable to open shared memory region: '/gpuserve-no-such'"),
        ("/", 0, 64, "cannot register shared memory region 'r' - invalid shm key '/'"),
        ("/../etc/passwd", 0, 64, "invalid shm key"),
        ("/triton_python_backend_shm_region_1", 0, 64, "contains the reserved prefix"),
        (None, 0, 4097, "failed to register shared memory region 'r': invalid args"),
        (None, (1 << 63) - 4096, 4096, "failed to register shared memory region 'r': invalid args"),
        (None, 0, 0, "failed to register shared memory region 'r': invalid args"),
    ],
)
def test_refused_registrations(client: Any, key: str | None, offset: int, nbytes: int, text: str) -> None:
    with memory(4096) as (_, own), pytest.raises(InferenceServerException) as caught:
        client.register_system_shared_memory("r", key or own, nbytes, offset=offset)
    assert text in str(caught.value)
    assert listed(client) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("protocol", CLIENTS)
def test_memory_of_the_servers_user_is_not_for_other_users(server: Addresses, protocol: str) -> None:
    with memory(4096) as (_, key), CLIENTS[protocol].InferenceServerClient(url(server, protocol)) as other:
        with another_user(), pytest.raises(InferenceServerException, match="Unable to open") as caught:
            other.register_system_shared_memory("r", key, 64)
        assert "Unable to open shared memory region" in str(caught.value)
        os.chown(f"/dev/shm{key}", ANOTHER, -1)
        other.register_system_shared_memory("r", key, 64)  # over the connection that the other user made
        other.unregister_system_shared_memory("r")


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Sockets that are made in here, by any thread, belong to another user."""
    os.seteuid(ANOTHER)
    try:
        yield
    finally:
        os.seteuid(0)


def test_bodies_that_register_nothing(server: Addresses) -> None:
    sender = Sender(_Operated(server))  # type: ignore[arg-type]
    path = "/v2/systemsharedmemory/region/r/register"
    asked = {
        b"{}": "Shared memory register request has no 'key' field",
        b'{"key": "/a"}': "Shared memory register request has no 'byte_size' field",
        b'{"key": 1, "byte_size": 1}': "'key': expected a string, got 1",
        b'{"key": "/a", "byte_size": -1}': "expected an integer of at least 0, got -1",
        b"[]": "expected an object, got an array",
        b"": "failed to parse the request JSON buffer",
    }
    for body, text in asked.items():
        status, told = sender.http(path, body)
        assert (status, text in told) == (400, True), told
    assert sender.http("/v2/systemsharedmemory/register", b'{"key": "/a", "byte_size": 1}') == (
        400,
        "'region name' is necessary to register system shared memory region",
    )
    assert sender.http("/v2/systemsharedmemory/region/none/status", method="GET") == (
        404,
        "Unable to find system shared memory region: 'none'",
    )
    assert sender.http("/v2/systemsharedmemory/status", method="GET") == (200, "[]")
    assert sender.http("/v2/systemsharedmemory/status")[0] == 405
    assert sender.http("/v2/systemsharedmemory/unregister") == (200, "")
    assert sender.http("/v2/systemsharedmemory/other")[0] == 404
    sender.close()


class _Operated:
    """What ``Sender`` wants to know of a server."""

    def __init__(self, server: Addresses) -> None:
        self.addresses = {"HTTP": server.http, "gRPC": server.grpc}


def test_device_memory_without_a_gpu(client: Any) -> None:
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("none such")
    handle = "QUFB" * 22  # base64
    with pytest.raises(InferenceServerException, match="failed to register CUDA shared memory region"):
        client.register_cuda_shared_memory("g", handle, 0, 64)
    status = client.get_cuda_shared_memory_status()
    assert (status if isinstance(status, list) else list(status.regions)) == []


# ---- what goes wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "nbytes", "text"),
    [
        (0, 65, "Invalid offset + byte size for shared memory region: 'in'"),
        (64, 16, "Invalid offset + byte size for shared memory region: 'in'"),
        (80, 16, "Invalid offset for shared memory region: 'in'"),
        (0, 12, "input byte size mismatch for input 'x' for model 'echo_FP32'. Expected 16, got 12"),
    ],
)
def test_a_place_that_does_not_hold_the_input(client: Any, offset: int, nbytes: int, text: str) -> None:
    with region(client, "in", 64):
        with pytest.raises(InferenceServerException) as caught:
            client.infer(ECHO, [in_region(client, ROW, "FP32", nbytes, offset)])
        assert text in str(caught.value)


def test_an_output_that_does_not_fit(client: Any) -> None:
    with region(client, "in", 64) as given, region(client, "out", 64):
        put(given, ROW.tobytes())
        inputs = [in_region(client, ROW, "FP32", 16)]
        with pytest.raises(InferenceServerException) as caught:
            client.infer(ECHO, inputs, outputs=[into_region(client, 12)])
        told = str(caught.value)
        assert "shared memory size specified with the request for output 'y' (12 bytes)" in told
        assert "should be at least 16 bytes to hold the results" in told


def test_a_region_that_is_not_there(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'in'"):
        client.infer(ECHO, [in_region(client, ROW, "FP32", 16)])


@pytest.mark.parametrize("name", [ECHO, "still"])
def test_a_file_that_shrinks_costs_its_own_requests_only(client: Any, name: str) -> None:
    with region(client, "in", MIB), region(client, "out", MIB):
        key = listed(client)["in"][0]
        os.truncate(f"/dev/shm{key}", 0)
        x = np.zeros((1, MIB // 4), np.float32)
        with pytest.raises(InferenceServerException, match="shrunk"):
            client.infer(name, [in_region(client, x, "FP32", MIB)])
        os.truncate(f"/dev/shm{listed(client)['out'][0]}", 0)
        own = library(client).InferInput("x", list(x.shape), "FP32")
        own.set_data_from_numpy(x)
        with pytest.raises(InferenceServerException, match="shrunk"):
            client.infer(name, [own], outputs=[into_region(client, MIB)])
        assert client.infer(name, [own]).as_numpy("y").shape == x.shape


def test_a_region_in_use_is_unregistered_afterwards(server: Addresses, client: Any, gate: Path) -> None:
    x = np.array([[1]], np.int32)
    with region(client, "in", 64) as given, ThreadPoolExecutor(1) as pool:
        put(given, x.tobytes())
        with CLIENTS_OF[library(client)](client) as other:
            asked = pool.submit(other.infer, "gated", [in_region(client, x, "INT32", 4)])
            wait_until(lambda: running(server) == 1, "the request runs", 10.0)
            client.unregister_system_shared_memory("in")
            assert list(listed(client)) == ["in"]
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'in'"):
                client.infer(ECHO, [in_region(client, ROW, "FP32", 16)])
            gate.write_bytes(b"x")
            assert asked.result(10).as_numpy("seen").tolist() == [[b""]]
            wait_until(lambda: listed(client) == {}, "the region is gone", 10.0)


def running(server: Addresses) -> float:
    with tritonclient.http.InferenceServerClient(server.http) as client:
        page = client._get("metrics", None, None).read().decode()
    name = 'gpuserve_running_requests{model="gated"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


def test_registering_many_times_leaves_no_descriptor(client: Any) -> None:
    with memory(4096) as (_, key):
        for _ in range(300):
            client.register_system_shared_memory("r", key, 4096)
            client.unregister_system_shared_memory("r")
            with pytest.raises(InferenceServerException):
                client.register_system_shared_memory("r", key, 4097)
        wait_until(lambda: descriptors() == [], "every region is closed", 10.0)


def descriptors() -> list[str]:
    """The files in /dev/shm that any process of the server has open."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if b"gpuserve" in (process / "cmdline").read_bytes() and process.name != str(os.getpid()):
                links = [os.readlink(one) for one in (process / "fd").iterdir()]
                found += [one for one in links if one.startswith("/dev/shm/gpuserve-test-")]
    return sorted(found)
