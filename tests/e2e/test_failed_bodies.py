"""Long bodies of requests that fail: neither the front nor a worker keeps them."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from config_file import models, write_config
from operated import OperatedServer
from processes import wait_until
from tritonclient.grpc import service_pb2 as pb

MIB = 1 << 20
#: Of the body of each request, so many of which are sent, one after the other.
NBYTES = 8 * MIB
N_REQUESTS = 12
#: Numbers of one byte each, which gzip makes little less of.
SMALL = random.Random(1).randbytes(MIB).translate(bytes(range(128)) * 2) * (NBYTES // MIB)
#: An allocator keeps some; all bodies are more.
KEPT_NBYTES = 48 * MIB
OPENAI_MODELS = Path(__file__).resolve().parents[1] / "models" / "openai_models.py"
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    talker = {"name": "talker", "callable": f"{OPENAI_MODELS}:Talker", "openai": True}
    config = write_config(
        tmp_path_factory.mktemp("failed"), [*models("echo_FP32", "flat_BYTES"), talker], host="127.0.0.1"
    )
    with OperatedServer(config).until_killed() as one:
        yield one


def post(path: str, body: bytes) -> Callable[[OperatedServer], bool]:
    """Return a function that sends the body, and says whether the request failed."""

    def send(server: OperatedServer) -> bool:
        with contextlib.closing(http.client.HTTPConnection(server.addresses["HTTP"], timeout=30)) as one:
            one.request("POST", path, body)
            response = one.getresponse()
            response.read()
            return response.status >= 400

    return send


def call(message: Any, compression: grpc.Compression, *, stream: bool) -> Callable[[OperatedServer], bool]:
    """The same for a message of ModelInfer, or of ModelStreamInfer."""
    serialised = message.SerializeToString()

    def send(server: OperatedServer) -> bool:
        method = "/inference.GRPCInferenceService/" + ("ModelStreamInfer" if stream else "ModelInfer")
        with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
            if stream:
                answers = channel.stream_stream(method)(
                    iter([serialised]), compression=compression, timeout=30
                )
                return all(pb.ModelStreamInferResponse.FromString(one).error_message for one in answers)
            try:
                channel.unary_unary(method)(serialised, compression=compression, timeout=30)
            except grpc.RpcError as error:
                return "data-type is 'INT32'" in str(error.details())
            return False

    return send


def typed() -> Any:
    """Return a message with numbers of a wrong type, each of a byte here and of four bytes when decoded."""
    message = pb.ModelInferRequest(model_name="echo_FP32")
    numbers = message.inputs.add(name="x", datatype="INT32", shape=[1, NBYTES])
    numbers.contents.int_contents.extend(SMALL)
    return message


def openai(member: str, value: Any, **more: Any) -> bytes:
    return json.dumps({"model": "talker", member: value, **more}).encode()


LONG_TEXT = "a" * NBYTES
INPUT = {"name": "x", "datatype": "INT32", "shape": [1, NBYTES // 2], "data": [0] * (NBYTES // 2)}
CASES: dict[str, Callable[[], Callable[[OperatedServer], bool]]] = {
    "openai-values": lambda: post("/v1/completions", openai("prompt", [0] * (NBYTES // 3))),
    "openai-model": lambda: post("/v1/completions", b'{"prompt":"%b"}' % LONG_TEXT.encode()),
    "openai-unknown": lambda: post("/v1/completions", openai("prompt", LONG_TEXT, model="nothing")),
    "openai-stop": lambda: post("/v1/completions", openai("stop", LONG_TEXT, prompt="a")),
    "openai-callable": lambda: post(
        "/v1/chat/completions",
        openai("messages", [{"role": "user", "content": "break before"}], user=LONG_TEXT),
    ),
    "openai-bad-request": lambda: post(
        "/v1/chat/completions", openai("messages", [{"role": "user", "content": "refuse"}], user=LONG_TEXT)
    ),
    "openai-stream": lambda: post(
        "/v1/chat/completions",
        openai("messages", [{"role": "user", "content": "refuse"}], user=LONG_TEXT, stream=True),
    ),
    "generate": lambda: post("/v2/models/flat_BYTES/generate", b'{"x": "%b", }' % LONG_TEXT.encode()),
    "http": lambda: post("/v2/models/echo_FP32/infer", json.dumps({"inputs": [INPUT]}).encode()),
    "grpc": lambda: call(typed(), grpc.Compression.NoCompression, stream=False),
    "grpc-gzip": lambda: call(typed(), grpc.Compression.Gzip, stream=False),
    "grpc-stream": lambda: call(typed(), grpc.Compression.NoCompression, stream=True),
}
FAST = ("openai-stop", "openai-model", "grpc")


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one in FAST else pytest.mark.thorough) for one in CASES]
)
def test_bodies_of_failed_requests_are_not_kept(server: OperatedServer, case: str) -> None:
    send = CASES[case]()
    assert send(server)
    before = kept_nbytes(server)
    for _ in range(N_REQUESTS):
        assert send(server)
    wait_until(lambda: kept_nbytes(server) - before < KEPT_NBYTES, "the bodies are given back", PATIENCE_S)
    wait_until(lambda: server.metric("gpuserve_intake_bytes") == 0, "nothing is counted", PATIENCE_S)


def kept_nbytes(server: OperatedServer) -> int:
    """Return what the front and the workers have of the machine alone."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in (server.front, *server.workers)]
    return sum(int(one.split("RssAnon:")[1].split()[0]) << 10 for one in statuses)
