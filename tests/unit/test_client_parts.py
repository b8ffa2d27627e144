"""The parts of the clients that need no server: URLs, settings, inputs, parameters, waits, failures."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from gpuserve.client import (
    ClientError,
    ClientInferenceServerError,
    ClientInvalidUrlError,
    ClientModelUnavailableError,
    ClientTimeoutError,
    ClientValueError,
    ModelClient,
)
from gpuserve.client.client_base import ReadinessWait
from gpuserve.client.client_config import (
    ClientModelConfig,
    DeviceKind,
    ResponseCache,
    TensorSpec,
    parse_model_config,
)
from gpuserve.client.client_settings import (
    ClientSettings,
    ServerUrl,
    create_auth_headers,
    extract_access_token_from_headers,
)
from gpuserve.client.decoupled_clients import is_final
from gpuserve.client.exceptions import inference_error, model_not_ready, server_not_ready
from gpuserve.client.request_builder import RequestBuilder, arrays_by_name, infer_options
from gpuserve.model.declaration import DynamicBatcher, QueuePolicy, TimeoutAction
from gpuserve.model.spec import BatchingSpec, InstanceSpec, ModelSpec, PolicySpec, QueueSpec
from gpuserve.model.triton_config import model_config, model_config_body
from gpuserve_worker.protocol.tensor import TensorSpec as WorkerTensorSpec

# ---- URLs and tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "parsed", "address"),
    [
        ("localhost", ServerUrl("http", "localhost", 8000), "localhost:8000"),
        ("localhost:9000", ServerUrl("http", "localhost", 9000), "localhost:9000"),
        ("http://localhost", ServerUrl("http", "localhost", 8000), "localhost:8000"),
        ("grpc://localhost", ServerUrl("grpc", "localhost", 8001), "localhost:8001"),
        ("GRPC://Host:1", ServerUrl("grpc", "host", 1), "host:1"),
        ("grpc://10.0.0.1:5/a/path?x", ServerUrl("grpc", "10.0.0.1", 5), "10.0.0.1:5"),
        ("http://[::1]:5", ServerUrl("http", "::1", 5), "[::1]:5"),
        ("https://host", ServerUrl("http", "host", 443, True), "host:443"),
        ("grpcs://host:5", ServerUrl("grpc", "host", 5, True), "host:5"),
    ],
)
def test_urls(url: str, parsed: ServerUrl, address: str) -> None:
    assert ServerUrl.parse(url) == parsed
    assert parsed.address == address
    assert ServerUrl.parse(str(parsed)).address == address


@pytest.mark.parametrize(
    "url",
    ["", "ws://host", "http://", "grpc://:1", "http://host:port", "host:99999", "a b", None, 8000, "u@h"],
)
def test_urls_that_are_none(url: Any) -> None:
    with pytest.raises(ClientInvalidUrlError, match="Invalid url"):
        ModelClient(url, "m")


def test_the_token_as_each_protocol_has_it() -> None:
    http, metadata = create_auth_headers("t", "HTTP"), create_auth_headers("t", "grpc")
    assert http == {"triton-access-token": "t"}
    assert metadata == {"triton-grpc-protocol-triton-access-token": "t"}
    assert extract_access_token_from_headers({"Triton-Access-Token": "t", **metadata}) == "t"
    assert extract_access_token_from_headers({"other": "t"}) is None
    with pytest.raises(ValueError, match="Conflicting authentication headers"):
        extract_access_token_from_headers({**http, **create_auth_headers("u", "grpc")})
    for wrong in ((None, "http"), ("", "http"), ("t", "ftp")):
        with pytest.raises(ValueError, match=r"access_token|Invalid protocol"):
            create_auth_headers(*wrong)


def settings(url: str = "grpc://host", **more: Any) -> ClientSettings:
    names = ("model_version", "init_timeout_s", "inference_timeout_s", "access_token")
    return ClientSettings.checked(url, "m", *(more.get(name) for name in names))


def test_settings() -> None:
    default = settings()
    assert (default.model_version, default.init_timeout_s, default.inference_timeout_s) == ("", 300.0, 60.0)
    assert default.headers() is None
    assert settings(access_token="t").headers({"A-B": 5}) == {**create_auth_headers("t", "grpc"), "a-b": "5"}
    assert settings("http://host").headers({"A-B": True}) == {"A-B": "True"}
    assert settings(model_version=2).shown == "m/2"


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_timeout_s": 0},
        {"inference_timeout_s": -1},
        {"inference_timeout_s": "5"},
        {"inference_timeout_s": True},
        {"inference_timeout_s": float("nan")},
    ],
)
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ClientValueError, match=next(iter(wrong))):
        settings(**wrong)


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_model_needs_a_name(name: Any) -> None:
    with pytest.raises(ClientValueError, match="model_name must be a non-empty string"):
        ModelClient("localhost", name)


# ---- configuration --------------------------------------------------------------------------------


def spec(**more: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "name": "m",
        "version": 3,
        "inputs": (WorkerTensorSpec("x", "FP32", (-1, 3)), WorkerTensorSpec("b", "BOOL", (1,), True)),
        "outputs": (WorkerTensorSpec("y", "BYTES", ()),),
        "max_batch_size": 8,
        "instances": tuple(InstanceSpec(one, one, {}) for one in ("cpu", "cuda:0", "cuda:1")),
        "decoupled": True,
        "batching": BatchingSpec(500, (4, 8), preserve_ordering=True),
        "queue": QueueSpec(
            priority_levels=2,
            default_priority=1,
            policy=PolicySpec("delay", 7),
            policies=((2, PolicySpec("reject", 9, True, 5)),),
        ),
        **more,
    }
    return ModelSpec(**values)


EXPECTED = ClientModelConfig(
    model_name="m",
    model_version=3,
    max_batch_size=8,
    batching=True,
    batcher=DynamicBatcher(
        500,
        [4, 8],
        True,
        2,
        1,
        QueuePolicy(TimeoutAction.DELAY, 7),
        {2: QueuePolicy(TimeoutAction.REJECT, 9, True, 5)},
    ),
    instance_group={DeviceKind.KIND_CPU: 1, DeviceKind.KIND_GPU: 2},
    decoupled=True,
    inputs=[TensorSpec("x", (-1, 3), np.float32), TensorSpec("b", (1,), bool, True)],
    outputs=[TensorSpec("y", (), np.bytes_)],
    response_cache=ResponseCache(False),
)


def test_a_configuration_is_read_as_it_was_written_in_either_json() -> None:
    message = model_config(spec())
    assert parse_model_config(json.loads(model_config_body(message))) == EXPECTED
    assert parse_model_config(MessageToDict(message, preserving_proto_field_name=True)) == EXPECTED


def test_a_configuration_that_says_little() -> None:
    found = parse_model_config({"name": "m", "parameters": {"k": {"string_value": "v"}}}, "5")
    assert (found.model_name, found.model_version, found.batching, found.batcher) == ("m", 5, False, None)
    assert (found.inputs, found.outputs, found.response_cache) == ([], [], None)
    assert found.backend_parameters == {"k": "v"}


# ---- inputs and parameters ------------------------------------------------------------------------


def test_inputs_by_position_take_the_declared_names_in_order() -> None:
    declared = [TensorSpec("a", (), bool), TensorSpec("b", (), bool, True)]
    assert arrays_by_name("m", declared, (1, 2), {}) == {"a": 1, "b": 2}
    assert arrays_by_name("m", declared, (1,), {}) == {"a": 1}
    assert arrays_by_name("m", declared, (), {"b": 1}) == {"b": 1}
    assert arrays_by_name("m", [], (), {}) == {}
    with pytest.raises(ClientValueError, match="m has 0 inputs, 1 were given"):
        arrays_by_name("m", None, (1,), {})


def test_parameters_of_the_protocol_are_taken_apart_from_the_models() -> None:
    given = {"a": "b", "priority": 2, "timeout": 5, "sequence_id": 7}
    options = {"parameters": {"a": "b"}, "priority": 2, "timeout": 5, "sequence_id": 7}
    assert infer_options(given, reserved=False) == options
    assert infer_options({}, reserved=False) == infer_options(None, reserved=False) == {}
    for wrong in ({"priority": -1}, {"timeout": "5"}, {"timeout": True}):
        with pytest.raises(ClientValueError, match="must be an integer of at least 0"):
            infer_options(wrong, reserved=False)


@pytest.mark.parametrize("module", [tritonclient.grpc, tritonclient.http])
@pytest.mark.parametrize("sample", [True, False])
def test_the_arguments_of_an_inference(module: Any, sample: bool) -> None:
    config = ClientModelConfig("m", inputs=[TensorSpec("x", (-1,), np.int16)])
    builder = RequestBuilder(settings(model_version="2", access_token="t"), config, module, reserved=False)
    arrays = (np.zeros((2, 3), np.int16),)
    arguments = builder.arguments(arrays, {}, {"a": 1}, {"H": "v"}, decoupled=False, sample=sample)
    (x,) = arguments.pop("inputs")
    assert (x.name(), x.datatype(), list(x.shape())) == ("x", "INT16", [1, 2, 3] if sample else [2, 3])
    assert arguments == {
        "model_name": "m",
        "model_version": "2",
        "headers": {**create_auth_headers("t", "grpc"), "h": "v"},
        "parameters": {"a": 1},
    }


# ---- responses of streams -------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "final"), [(None, False), (False, False), (True, True)])
def test_which_response_is_the_last(said: bool | None, final: bool) -> None:
    response = pb.ModelInferResponse(model_name="m")
    if said is not None:
        response.parameters["triton_final_response"].bool_param = said
    assert is_final(tritonclient.grpc.InferResult(response)) == final


# ---- waits and failures ---------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_grow_to_a_second_and_end_with_the_time() -> None:
    clock = Clock()
    wait = ReadinessWait(5.0, clock)
    pauses = []
    while (pause := wait.pause_s()) is not None:
        pauses.append(pause)
        clock.now += pause
    assert (pauses[:3], max(pauses)) == ([0.02, 0.04, 0.08], 1.0)
    assert sum(pauses) == pytest.approx(5.0)


def test_a_question_may_take_what_is_left_within_bounds() -> None:
    clock = Clock()
    wait = ReadinessWait(60.0, clock)
    assert wait.poll_timeout_s == 10.0
    clock.now += 57
    assert wait.poll_timeout_s == 3.0
    clock.now += 10
    assert wait.poll_timeout_s == 0.1


class RpcError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InferenceServerException("Deadline Exceeded", "StatusCode.DEADLINE_EXCEEDED"), ClientTimeoutError),
        (InferenceServerException("late", "504"), ClientTimeoutError),
        (ConnectionRefusedError(111, "Connection refused"), ClientTimeoutError),
        (TimeoutError("timed out"), ClientTimeoutError),
        (RpcError(), ClientTimeoutError),
        (InferenceServerException("wrong", "400"), ClientInferenceServerError),
        (InferenceServerException("wrong"), ClientInferenceServerError),
        (EOFError(), ClientInferenceServerError),
    ],
)
def test_failures(error: Exception, kind: type[ClientError]) -> None:
    made = inference_error(error, 1.5)
    assert type(made) is kind
    assert made.message == str(made)
    assert ("Timeout: 1.5 s" in made.message) == (kind is ClientTimeoutError)
    assert made.message.endswith(("Exceeded", "late", "refused", "timed out", "wrong", "EOFError"))


def test_why_a_wait_ended() -> None:
    unknown = InferenceServerException("Request for unknown model: 'm' is not found", "400")
    assert type(model_not_ready("m/1", unknown)) is ClientModelUnavailableError
    assert type(model_not_ready("m/1", InferenceServerException("no", "404"))) is ClientModelUnavailableError
    assert type(model_not_ready("m/1", InferenceServerException("no", "403"))) is ClientTimeoutError
    assert str(model_not_ready("m/1", None)) == "Waiting for model m/1 to be ready timed out."
    assert str(server_not_ready(OSError("x"))) == "Waiting for server to be ready timed out. Message: x"


# ---- what is imported -----------------------------------------------------------------------------


def test_names_are_imported_when_they_are_used() -> None:
    program = "import gpuserve.client, sys; print('tritonclient' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_grpc_clients_need_no_packages_of_http() -> None:
    program = (
        "import sys\n"
        "for name in ('gevent', 'geventhttpclient', 'aiohttp', 'tritonclient.http'):\n"
        "    sys.modules[name] = None\n"
        "from gpuserve.client import ModelClient, AsyncioModelClient\n"
        "for kind in (ModelClient, AsyncioModelClient):\n"
        "    kind('grpc://localhost', 'm')._library\n"
        "    try: kind('localhost', 'm')._library\n"
        "    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'gpuserve[client]'") == 2


def test_a_package_that_grpc_misses_is_not_one_of_http() -> None:
    program = (
        "import sys\n"
        "sys.modules['grpc'] = None\n"
        "from gpuserve.client import ModelClient\n"
        "try: ModelClient('grpc://localhost', 'm')._library\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "grpc" in done.stdout
    assert "HTTP" not in done.stdout
