"""What tritonclient's own examples do, with each of its four clients: sync and async, HTTP and gRPC.

Every test is one body for all four; ``Asked`` awaits what an async client gives.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from config_file import model, tensor, write_config
from serving import GPUSERVE, Addresses, serving
from tritonclient.utils import InferenceServerException

#: name -> (module of the client, module of its tensors, port)
CLIENTS = {
    "http": ("tritonclient.http", "tritonclient.http", "http"),
    "grpc": ("tritonclient.grpc", "tritonclient.grpc", "grpc"),
    "http aio": ("tritonclient.http.aio", "tritonclient.http", "http"),
    "grpc aio": ("tritonclient.grpc.aio", "tritonclient.grpc", "grpc"),
}
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    four = [tensor("x", "FP32", 4)], [tensor("y", "FP32", 4, labels=["a", "b", "c", "d"])]
    spare = model("spare", "echo", [tensor("x", "FP32", 1)], [tensor("y", "FP32", 1)], 2)
    told = [tensor("seen", "BYTES", 1), tensor("wanted", "BYTES", 1)]
    made = [
        model("echo", "echo", *four, 8),
        model("strings", "echo", [tensor("x", "BYTES", -1)], [tensor("y", "BYTES", -1)], 8),
        model("parameters", "parameters", [tensor("x", "FP32", 1)], told, 4),
        spare,
    ]
    config = write_config(
        tmp_path_factory.mktemp("server"),
        made,
        host="127.0.0.1",
        compat_name="triton",
        model_control="explicit",
        load_at_start=[one["name"] for one in made if one is not spare],
    )
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses


class Asked:
    """A client of any kind; every call is finished when it returns."""

    def __init__(self, kind: str, server: Addresses, loop: asyncio.AbstractEventLoop) -> None:
        client, tensors, port = CLIENTS[kind]
        self.protocol = port
        self.tensors: ModuleType = importlib.import_module(tensors)
        self._loop = loop
        self._client = self._finished(lambda: importlib.import_module(client).InferenceServerClient)(
            getattr(server, port)
        )

    def __getattr__(self, name: str) -> Any:
        return self._finished(lambda: getattr(self._client, name))

    def _finished(self, found: Any) -> Any:
        def call(*positional: Any, **named: Any) -> Any:
            async def run() -> Any:
                result = found()(*positional, **named)
                return await result if inspect.isawaitable(result) else result

            return self._loop.run_until_complete(run())

        return call

    def streamed(self, requests: Any) -> list[Any]:
        """What came on a stream: (result, error) of each message."""

        async def run() -> list[Any]:
            return [one async for one in self._client.stream_infer(requests)]

        return self._loop.run_until_complete(run())

    def input(self, array: np.ndarray[Any, Any], datatype: str = "FP32") -> Any:
        made = self.tensors.InferInput("x", list(array.shape), datatype)
        return made.set_data_from_numpy(array)

    def output(self, name: str, **more: Any) -> Any:
        return self.tensors.InferRequestedOutput(name, **more)

    def document(self, found: Any) -> Any:
        """An answer as plain values, whichever protocol it came over."""
        if self.protocol == "http":
            return found
        from google.protobuf.json_format import MessageToDict

        return MessageToDict(found, preserving_proto_field_name=True)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module", params=CLIENTS)
def client(
    request: pytest.FixtureRequest, server: Addresses, loop: asyncio.AbstractEventLoop
) -> Iterator[Asked]:
    asked = Asked(request.param, server, loop)
    assert asked.is_server_live()  # it has its connection before the first test
    yield asked
    asked.close()


def test_health_and_metadata(client: Asked) -> None:
    assert (client.is_server_live(), client.is_server_ready()) == (True, True)
    assert client.document(client.get_server_metadata())["name"] == "triton"
    assert (client.is_model_ready("echo"), client.is_model_ready("unknown")) == (True, False)
    metadata = client.document(client.get_model_metadata("echo"))
    assert (metadata["name"], metadata["versions"]) == ("echo", ["1"])
    config = client.document(client.get_model_config("echo"))
    assert config.get("config", config)["max_batch_size"] == 8


def test_inference(client: Asked) -> None:
    result = client.infer("echo", [client.input(ROWS)], request_id="seven")
    assert np.array_equal(result.as_numpy("y"), ROWS)
    assert client.document(result.get_response())["id"] == "seven"
    named = client.infer("echo", [client.input(ROWS)], model_version="1", outputs=[client.output("y")])
    assert np.array_equal(named.as_numpy("y"), ROWS)


def test_strings(client: Asked) -> None:
    array = np.array([[b"one", b"", "zwölf".encode()]], dtype=np.object_)
    assert client.infer("strings", [client.input(array, "BYTES")]).as_numpy("y").tolist() == array.tolist()


def test_classes(client: Asked) -> None:
    found = client.infer("echo", [client.input(ROWS)], outputs=[client.output("y", class_count=2)]).as_numpy(
        "y"
    )
    assert found.tolist() == [
        [b"3.000000:3:d", b"2.000000:2:c"],
        [b"7.000000:3:d", b"6.000000:2:c"],
    ]


def test_parameters_reach_the_model(client: Asked) -> None:
    one = client.input(np.zeros((1, 1), np.float32))
    seen = client.infer("parameters", [one], parameters={"a": 1, "b": "two", "c": True}).as_numpy("seen")
    assert seen.item() == repr([("a", 1), ("b", "two"), ("c", True)]).encode()
    with pytest.raises(InferenceServerException, match="reserved"):
        client.infer("parameters", [one], parameters={"timeout": 1})


def test_priority_and_timeout(client: Asked) -> None:
    result = client.infer("echo", [client.input(ROWS)], priority=1, timeout=10_000_000)
    assert np.array_equal(result.as_numpy("y"), ROWS)


def test_compression(client: Asked) -> None:
    for algorithm in ("gzip", "deflate"):
        options = {"compression_algorithm": algorithm}
        if client.protocol == "http":
            options = {
                "request_compression_algorithm": algorithm,
                "response_compression_algorithm": algorithm,
            }
        assert np.array_equal(client.infer("echo", [client.input(ROWS)], **options).as_numpy("y"), ROWS)


@pytest.mark.parametrize(
    ("name", "rows", "grpc_status", "http_status", "text"),
    [
        ("unknown", 2, "StatusCode.NOT_FOUND", "404", "Request for unknown model: 'unknown' is not found"),
        (
            "echo",
            9,
            "StatusCode.INVALID_ARGUMENT",
            "400",
            "inference request batch-size must be <= 8 for 'echo'",
        ),
    ],
)
def test_errors(client: Asked, name: str, rows: int, grpc_status: str, http_status: str, text: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer(name, [client.input(np.zeros((rows, 4), np.float32))])
    assert raised.value.status() == (http_status if client.protocol == "http" else grpc_status)
    assert text in raised.value.message()


def test_statistics(client: Asked) -> None:
    def successes() -> int:
        found = client.document(client.get_inference_statistics("strings"))["model_stats"]
        assert len(found) == 1
        return int(found[0]["inference_stats"]["success"].get("count", 0))

    before = successes()
    client.infer("strings", [client.input(np.array([[b"x"]], dtype=np.object_), "BYTES")])
    assert successes() == before + 1


def test_loading_and_unloading(client: Asked) -> None:
    client.load_model("spare", config=json.dumps({"max_batch_size": "4"}))
    assert client.is_model_ready("spare")
    config = client.document(client.get_model_config("spare"))
    assert config.get("config", config)["max_batch_size"] == 4
    client.unload_model("spare")
    assert not client.is_model_ready("spare")
    index = client.document(client.get_model_repository_index())
    states = {
        one["name"]: one.get("state") for one in (index if isinstance(index, list) else index["models"])
    }
    assert (states["echo"], states["spare"]) == ("READY", "UNAVAILABLE")
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("unknown")


def test_trace_and_log_settings(client: Asked) -> None:
    def value(found: Any, name: str) -> Any:
        """A setting, whichever protocol it came over."""
        document = client.document(found)
        if client.protocol == "http":
            return document[name]
        setting = document["settings"][name]
        return setting["value"][0] if "value" in setting else next(iter(setting.values()))

    updated = client.update_trace_settings("echo", {"trace_rate": "7"})
    assert value(updated, "trace_rate") == "7"
    assert value(client.update_trace_settings("echo", {"trace_rate": None}), "trace_rate") == "1000"
    assert value(client.update_log_settings({"log_verbose_level": 1}), "log_verbose_level") == 1
    client.update_log_settings({"log_verbose_level": 0})
    assert value(client.get_log_settings(), "log_info") is True


def test_shared_memory_of_nobody(client: Asked) -> None:
    assert not client.document(client.get_system_shared_memory_status())
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    with pytest.raises(
        InferenceServerException, match="Unable to open shared memory region: '/gpuserve_none'"
    ):
        client.register_system_shared_memory("none", "/gpuserve_none", 8)


@pytest.fixture(scope="module")
def streaming(server: Addresses, loop: asyncio.AbstractEventLoop) -> Iterator[Asked]:
    """The client that streams without a thread of its own; ``test_streams.py`` has the other."""
    asked = Asked("grpc aio", server, loop)
    assert asked.is_server_live()
    yield asked
    asked.close()


def test_a_stream_is_answered_in_order_and_goes_on_after_an_error(streaming: Asked) -> None:
    x = streaming.input(ROWS)

    async def requests() -> Any:
        for number in range(5):
            name = "unknown" if number == 2 else "echo"
            yield {"model_name": name, "inputs": [x], "request_id": str(number)}

    told = streaming.streamed(requests())
    assert [error or result.get_response().id for result, error in told] == ["0", "1", told[2][1], "3", "4"]
    assert told[2][1].message() == "Request for unknown model: 'unknown' is not found"
