"""Inference as clients see it: every datatype by every encoding, over both protocols."""

from __future__ import annotations

import asyncio
import gzip
import json
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from config_file import DATATYPES
from ingress import with_ingress
from numpy.typing import NDArray
from processes import wait_until
from serving import Addresses
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

NUMPY = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    **{
        f"{sign}INT{bits}": getattr(np, f"{sign.lower()}int{bits}")
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
}
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
CLIENTS = {"grpc": tritonclient.grpc, "http": tritonclient.http}
GIB = 1 << 30


def sample(datatype: str, rows: int = 2) -> NDArray[Any]:
    """Edge values of the type, [rows, 4]."""
    if datatype == "BYTES":
        row: Any = np.array([b"", b"a\0b", "ä".encode(), b"\xff\xfe"], dtype=object)
    elif datatype == "BOOL":
        row = np.array([True, False, False, True])
    elif "INT" in datatype:
        info = np.iinfo(NUMPY[datatype])
        row = np.array([info.min, info.max, 1, 7], dtype=NUMPY[datatype])
    else:
        row = np.array([0.0, -1.5, np.inf, 3.25], dtype=NUMPY[datatype])
    return np.stack([row] * rows)


def url(server: Addresses, protocol: str) -> str:
    return server.grpc if protocol == "grpc" else server.http


def tensor(protocol: str, name: str, array: NDArray[Any], datatype: str, **how: Any) -> Any:
    made = CLIENTS[protocol].InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, **how)
    return made


def infer(server: Addresses, protocol: str, model: str, inputs: list[Any], **options: Any) -> Any:
    with CLIENTS[protocol].InferenceServerClient(url(server, protocol)) as client:
        return client.infer(model, inputs, **options)


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.shape == right.shape and left.tolist() == right.tolist()


def metric(server: Addresses, line_start: str) -> float:
    with urllib.request.urlopen(
        f"http://{server.metrics.removeprefix('http://').removesuffix('/metrics')}/metrics"
    ) as page:
        text = page.read().decode()
    starts = with_ingress(line_start)
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(starts))


def by_stub(server: Addresses, request: Any, **options: Any) -> Any:
    """The answer to a message built by hand."""
    with grpc.insecure_channel(server.grpc) as channel:
        return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, **options)


def by_json(server: Addresses, model: str, body: dict[str, Any], **headers: str) -> tuple[Any, bytes]:
    """The headers and the body of the answer to a request built by hand."""
    request = urllib.request.Request(
        f"http://{server.http}/v2/models/{model}/infer", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers, answer.read()


@pytest.fixture(scope="module", autouse=True)
def _no_block_is_kept(server: Addresses) -> Iterator[None]:
    yield
    wait_until(lambda: metric(server, "gpuserve_arena_blocks") == 0, "the arena is empty", 5.0)


@pytest.mark.parametrize("protocol", CLIENTS)
@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_in_binary(server: Addresses, protocol: str, datatype: str) -> None:
    x = sample(datatype)
    result = infer(server, protocol, f"echo_{datatype}", [tensor(protocol, "x", x, datatype)])
    assert same(result.as_numpy("y"), x)


@pytest.mark.parametrize("datatype", CONTENTS)
def test_every_datatype_in_typed_contents(server: Addresses, datatype: str) -> None:
    x = sample(datatype)
    request = service_pb2.ModelInferRequest(model_name=f"echo_{datatype}")
    sent = request.inputs.add(name="x", datatype=datatype, shape=x.shape)
    getattr(sent.contents, CONTENTS[datatype]).extend(x.ravel().tolist())
    reply = by_stub(server, request)
    assert same(tritonclient.grpc.InferResult(reply).as_numpy("y"), x)
    assert (reply.model_version, len(reply.raw_output_contents)) == ("1", 1)


@pytest.mark.parametrize("datatype", [one for one in DATATYPES if one not in {"FP16", "BF16"}])
def test_every_datatype_in_json(server: Addresses, datatype: str) -> None:
    x = sample(datatype)
    if datatype == "BYTES":
        x = x[:, :3]
    result = infer(server, "http", f"echo_{datatype}", [tensor("http", "x", x, datatype, binary_data=False)])
    assert same(result.as_numpy("y"), x)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_types_without_a_json_form_are_refused_in_json(server: Addresses, datatype: str) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": datatype, "data": [1.0]}]}
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(
            f"http://{server.http}/v2/models/echo_{datatype}/infer", json.dumps(body).encode()
        )
    with raised.value as answer:
        text = json.loads(answer.read())["error"]
    assert f"receiving {datatype} data via JSON is not supported" in text


@pytest.mark.parametrize("protocol", CLIENTS)
@pytest.mark.parametrize(
    ("model", "shape"),
    [("echo_FP32", (3, 0)), ("cube", (2, 0, 2, 3)), ("cube", (3, 5, 2, 3)), ("flat_FP32", ())],
)
def test_unusual_shapes(server: Addresses, protocol: str, model: str, shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    assert same(infer(server, protocol, model, [tensor(protocol, "x", x, "FP32")]).as_numpy("y"), x)


@pytest.mark.parametrize("protocol", CLIENTS)
@pytest.mark.parametrize(
    ("model", "x"),
    [
        ("flat_BYTES", np.array(b"a\0b", dtype=object)),
        ("flat_BYTES", np.array(b"", dtype=object)),
        ("echo_BYTES", np.array([[b"", b""]], dtype=object)),
        ("echo_BYTES", np.empty((2, 0), dtype=object)),
    ],
)
def test_unusual_shapes_of_bytes(
    server: Addresses, protocol: str, model: str, x: NDArray[np.object_]
) -> None:
    assert same(infer(server, protocol, model, [tensor(protocol, "x", x, "BYTES")]).as_numpy("y"), x)


@pytest.mark.parametrize(("model", "shape", "data"), [("echo_FP32", [2, 0], []), ("flat_FP32", [], [1.5])])
def test_unusual_shapes_in_typed_contents_and_json(
    server: Addresses, model: str, shape: list[int], data: list[float]
) -> None:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=shape).contents.fp32_contents.extend(data)
    expected = np.array(data, np.float32).reshape(shape)
    assert same(tritonclient.grpc.InferResult(by_stub(server, request)).as_numpy("y"), expected)
    sent = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    _, answer = by_json(server, model, {"inputs": [sent]})
    assert json.loads(answer)["outputs"] == [{"name": "y", "datatype": "FP32", "shape": shape, "data": data}]


@pytest.mark.parametrize("protocol", CLIENTS)
def test_optional_inputs(server: Addresses, protocol: str) -> None:
    one = np.ones((2, 1), np.float32)
    a, b = tensor(protocol, "a", one, "FP32"), tensor(protocol, "b", 2 * one, "FP32")
    alone = infer(server, protocol, "optional", [a])
    both = infer(server, protocol, "optional", [b, a])
    assert (alone.as_numpy("given")[0, 0], both.as_numpy("given")[0, 0]) == (b"a", b"a,b")
    assert (alone.as_numpy("sum")[1, 0], both.as_numpy("sum")[1, 0]) == (1.0, 3.0)


@pytest.mark.parametrize("protocol", CLIENTS)
def test_parameters_id_and_requested_outputs(server: Addresses, protocol: str) -> None:
    x = tensor(protocol, "x", np.ones((1, 1), np.float32), "FP32")
    wanted = CLIENTS[protocol].InferRequestedOutput("seen")
    result = infer(
        server,
        protocol,
        "parameters",
        [x],
        outputs=[wanted],
        request_id="ä-1",
        parameters={"flag": True, "count": 7, "share": 0.25, "text": "t"},
    )
    seen = result.as_numpy("seen")[0, 0].decode()
    assert seen == "[('count', 7), ('flag', True), ('share', 0.25), ('text', 't')]"
    assert result.as_numpy("wanted") is None
    response = result.get_response()
    assert (response["id"] if protocol == "http" else response.id) == "ä-1"


@pytest.mark.parametrize("protocol", CLIENTS)
def test_outputs_come_in_the_order_asked_for(server: Addresses, protocol: str) -> None:
    x = tensor(protocol, "x", np.ones((1, 1), np.int32), "INT32")
    outputs = [CLIENTS[protocol].InferRequestedOutput(name) for name in ("y", "rows")]
    response = infer(server, protocol, "batch_rows", [x], outputs=outputs).get_response()
    listed = response["outputs"] if protocol == "http" else response.outputs
    assert [one["name"] if protocol == "http" else one.name for one in listed] == ["y", "rows"]


@pytest.mark.parametrize(("coding", "plain"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_an_answer_is_compressed_for_those_who_ask(server: Addresses, coding: str, plain: Any) -> None:
    sent = {"name": "x", "datatype": "FP32", "shape": [1, 10_000], "data": [0.0] * 10_000}
    headers, answer = by_json(server, "echo_FP32", {"inputs": [sent]}, **{"Accept-Encoding": coding})
    assert headers["Content-Encoding"] == coding
    assert json.loads(plain(answer))["outputs"][0]["data"] == sent["data"]


def test_both_protocols_answer_on_the_http_port(server: Addresses) -> None:
    x = np.ones((1, 3), np.float32)
    with tritonclient.grpc.InferenceServerClient(server.http) as client:
        assert same(client.infer("echo_FP32", [tensor("grpc", "x", x, "FP32")]).as_numpy("y"), x)


@pytest.mark.parametrize("protocol", CLIENTS)
@pytest.mark.parametrize("nbytes", [63 << 10, 65 << 10, 1 << 20, 64 << 20])
def test_sizes_around_the_arena(server: Addresses, protocol: str, nbytes: int) -> None:
    x = np.random.default_rng(nbytes).integers(0, 255, (1, nbytes), dtype=np.uint8)
    result = infer(server, protocol, "echo_UINT8", [tensor(protocol, "x", x, "UINT8")])
    assert np.array_equal(result.as_numpy("y"), x)
    wait_until(lambda: metric(server, "gpuserve_arena_blocks") == 0, "the arena is empty", 5.0)


def available_nbytes() -> int:
    """Memory that can still be had, as the kernel estimates it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.skipif(available_nbytes() < 8 * GIB, reason="needs 8 GiB of memory")
@pytest.mark.parametrize("server", ["native"], indirect=True)
@pytest.mark.parametrize("protocol", CLIENTS)
def test_a_tensor_of_one_gib(server: Addresses, protocol: str) -> None:
    x = np.arange(GIB // 4, dtype=np.uint32).view(np.float32).reshape(1, -1)
    result = infer(server, protocol, "echo_FP32", [tensor(protocol, "x", x, "FP32")])
    assert np.array_equal(result.as_numpy("y").view(np.uint32), x.view(np.uint32))


def numbered(number: int) -> NDArray[np.int32]:
    """A row that says whose it is. Ten of one length follow each other: another length ends a batch."""
    return np.full((1, 1 + number // 10 % 3), number, np.int32)


def batch_size(number: int, result: Any) -> int:
    """How many rows the batch of this request had; its answer is its own."""
    assert same(result.as_numpy("y"), numbered(number)), "requests of other shapes are in other batches"
    return int(result.as_numpy("rows")[0, 0])


def test_a_hundred_at_once_over_grpc_are_merged_and_none_is_mixed_up(server: Addresses) -> None:
    def one(number: int) -> int:
        return batch_size(
            number, client.infer("batch_rows", [tensor("grpc", "x", numbered(number), "INT32")])
        )

    with tritonclient.grpc.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(100) as pool:
        assert max(pool.map(one, range(400))) > 1


def test_a_hundred_at_once_over_http_are_merged_and_none_is_mixed_up(server: Addresses) -> None:
    async def every() -> list[int]:
        async def one(number: int) -> int:
            sent = [tensor("http", "x", numbered(number), "INT32")]
            return batch_size(number, await client.infer("batch_rows", sent))

        client = tritonclient.http.aio.InferenceServerClient(server.http, conn_limit=100)
        try:
            return await asyncio.gather(*map(one, range(400)))
        finally:
            await client.close()

    assert max(asyncio.run(every())) > 1


def test_a_model_version_is_checked(server: Addresses) -> None:
    x = np.ones((1, 1), np.float32)
    for protocol in CLIENTS:
        sent = [tensor(protocol, "x", x, "FP32")]
        assert same(infer(server, protocol, "echo_FP32", sent, model_version="1").as_numpy("y"), x)
        with pytest.raises(InferenceServerException, match="version 2 is not found"):
            infer(server, protocol, "echo_FP32", sent, model_version="2")
