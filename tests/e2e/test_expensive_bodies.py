"""No body makes a turn of an event loop long, whatever is in it. The turns are measured by the servers of all
tests (``long_turns.py``): here are the bodies that are made for it.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import expensive
import grpc
import numpy as np
import pytest
from config_file import models, served
from exploring import variants
from sending import message
from serving import Addresses

TIMEOUT_S = 60.0
SERVICE = "/inference.GRPCInferenceService/"
MIB = 1 << 20
SERVED = [f"echo_{one}" for one in ("FP32", "INT32", "INT64", "BOOL", "BYTES")] + ["flat_BYTES"]
KNOWN = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "NOT_FOUND", "INTERNAL", "UNAVAILABLE"}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    folder = tmp_path_factory.mktemp("expensive")
    waits = {"max_queue_delay_us": 500_000, "preferred_batch_sizes": [4]}
    joined = {**models("echo_FP32")[0], "name": "joined", "batching": waits}
    with served(folder, [*models(*SERVED), joined], model_control="explicit") as found:
        yield found


@pytest.fixture(scope="module")
def channel(addresses: Addresses) -> Iterator[Any]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(addresses.grpc, options) as made:
        grpc.channel_ready_future(made).result(TIMEOUT_S)  # its connection is no test's own
        yield made


def same(data: bytes) -> bytes:
    return data


def code_of(call: Any) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def post(addresses: Addresses, path: str, body: bytes, **headers: str) -> int:
    connection = http.client.HTTPConnection(addresses.http, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@pytest.mark.parametrize("nbytes", variants(250 << 10, 64 << 10, 8 * MIB))
@pytest.mark.parametrize("way", ["unary", "gzip", "stream"])
@pytest.mark.parametrize("shape", expensive.GRPC)
def test_grpc(channel: Any, shape: str, way: str, nbytes: int) -> None:
    body = expensive.GRPC[shape](nbytes)
    if way == "stream":
        call = channel.stream_stream(f"{SERVICE}ModelStreamInfer", same, same)
        assert code_of(lambda: list(call(iter([body]), timeout=TIMEOUT_S))) in KNOWN
    else:
        call = channel.unary_unary(f"{SERVICE}ModelInfer", same, same)
        compression = grpc.Compression.Gzip if way == "gzip" else None
        assert code_of(lambda: call(body, timeout=TIMEOUT_S, compression=compression)) in KNOWN


@pytest.mark.parametrize("nbytes", variants(250 << 10, 8 * MIB))
@pytest.mark.parametrize("way", ["json", "gzip", "header", "generate"])
@pytest.mark.parametrize("shape", expensive.JSON)
def test_json(addresses: Addresses, shape: str, way: str, nbytes: int) -> None:
    body = expensive.JSON[shape](nbytes)
    path = f"/v2/models/echo_{shape.split(maxsplit=1)[0]}/infer"
    if way == "gzip":
        status = post(addresses, path, gzip.compress(body, 1), content_encoding="gzip")
    elif way == "header":
        status = post(addresses, path, body, inference_header_content_length=str(len(body)))
    elif way == "generate":
        document = body.replace(b'"inputs"', b'"x"', 1)
        status = post(addresses, path.replace("/infer", "/generate"), document)
    else:
        status = post(addresses, path, body)
    assert 200 <= status < 600


@pytest.mark.parametrize(
    "path",
    [
        "repository/models/none/load",
        "repository/models/none/unload",
        "repository/index",
        "trace/setting",
        "logging",
        "systemsharedmemory/region/r/register",
        "cudasharedmemory/region/r/register",
        "models/flat_BYTES/generate_stream",
    ],
)
@pytest.mark.parametrize("shape", ["keys", "values", "text", "arrays", "escapes"])
@pytest.mark.parametrize("nbytes", variants(1 * MIB, 60 << 10, 4 * MIB))
def test_settings_and_loads(addresses: Addresses, path: str, shape: str, nbytes: int) -> None:
    body = {
        "keys": lambda: json.dumps({f"{i:x}": 1 for i in range(nbytes // 10)}),
        "values": lambda: json.dumps({"parameters": [0] * (nbytes // 3)}),
        "text": lambda: json.dumps(
            {"parameters": {"file:1/model.onnx": "A" * (nbytes // 4 * 4), "config": "{}"}}
        ),
        "arrays": lambda: (
            json.dumps({"x": "s"})[:-1] + ',"y":' + "[" * (nbytes // 2) + "]" * (nbytes // 2) + "}"
        ),
        "escapes": lambda: '{"x":"' + "\\u00e9" * (nbytes // 6) + '"}',
    }[shape]()
    assert 200 <= post(addresses, f"/v2/{path}", body.encode()) < 600


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["unary", "http"])
def test_batches_of_large_bodies(addresses: Addresses, channel: Any, way: str) -> None:
    """Bodies on their way in, into a batch and out, and the return of their memory to the machine."""
    n = 10 * MIB
    values = np.arange(n, dtype=np.int32).view(np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, n], "parameters": {"binary_data_size": 4 * n}}
    asked = {"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    head = json.dumps(asked).encode()

    def answered() -> bytes:
        if way == "http":
            length = {"Inference-Header-Content-Length": str(len(head))}
            connection = http.client.HTTPConnection(addresses.http, timeout=TIMEOUT_S)
            with contextlib.closing(connection):
                connection.request("POST", "/v2/models/joined/infer", head + values.tobytes(), length)
                return connection.getresponse().read()
        body = message("joined", 1, n, raw=values.tobytes()).SerializeToString()
        return bytes(channel.unary_unary(f"{SERVICE}ModelInfer", same, same)(body, timeout=TIMEOUT_S))

    for _ in range(2):
        with ThreadPoolExecutor(4) as threads:
            for one in [threads.submit(answered) for _ in range(4)]:
                assert one.result()[-4 * n :] == values.tobytes()
