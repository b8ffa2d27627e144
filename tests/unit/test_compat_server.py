"""``Triton`` and ``RemoteTriton`` without a server: states, errors, and how models are declared and told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve import errors
from gpuserve.compat.pytriton import exceptions
from gpuserve.compat.pytriton.check import (
    ProcessMonitoring,
    ScriptThread,
    get_current_container_version,
    search_warning_on_too_verbose_log_level,
    verify_docker_image_in_readme_same_as_tested,
)
from gpuserve.compat.pytriton.client.exceptions import PyTritonClientInvalidUrlError
from gpuserve.compat.pytriton.client.utils import ModelState, TritonUrl, parse_http_response, state_in
from gpuserve.compat.pytriton.model_config import (
    DeviceKind,
    DynamicBatcher,
    ModelConfig,
    ModelConfigGenerator,
    ModelConfigParser,
    ModelWarmup,
    QueuePolicy,
    ResponseCache,
    Tensor,
    TensorSpec,
    TritonModelConfig,
    WarmupInput,
    generate_warmup_data,
    generate_warmup_requests,
)
from gpuserve.compat.pytriton.proxy import Request, Requests, Response, Responses, traced_span
from gpuserve.compat.pytriton.triton import RemoteTriton, Triton
from gpuserve_worker.inference.failure import UnrecoverableError

FLOATS = [Tensor((1,), np.float32)]


def infer(requests: Any) -> Any:
    return requests


def bind(model_name: Any = "m", infer_func: Any = infer, outputs: Any = FLOATS, **more: Any) -> None:
    Triton().bind(model_name, infer_func, FLOATS, outputs, **more)


INVALID, BAD = exceptions.PyTritonValidationError, exceptions.PyTritonBadParameterError


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model_name": ""}, INVALID, "Model name cannot be empty"),
        ({"model_name": "a b"}, INVALID, "can only contain alphanumeric characters, dots, underscores and"),
        ({"infer_func": 3}, INVALID, "infer_func must be a callable or a non-empty sequence of callables"),
        (
            {"outputs": [Tensor((1,), np.float32, optional=True)]},
            INVALID,
            "output tensors cannot be optional",
        ),
        ({"outputs": [Tensor((1,), np.complex64)]}, INVALID, "has no v2 datatype"),
        ({"config": ModelConfig(max_batch_size=0)}, BAD, "size must be an integer of at least 1, got 0"),
        (
            {"config": ModelConfig(batcher=DynamicBatcher(priority_levels=5, default_priority_level=6))},
            BAD,
            "The `default_priority_level` must be between 1 and 5.",
        ),
        ({"trace_config": ["mode=opentelemetry"]}, INVALID, r"bind\(trace_config=…\) is not supported"),
    ],
)
def test_what_cannot_be_bound(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        bind(**arguments)


def test_a_name_is_bound_once() -> None:
    triton = Triton()
    triton.bind("name", infer, FLOATS, FLOATS)
    text = "Cannot add model with the same name twice"
    with pytest.raises(exceptions.PyTritonInvalidOperationError, match=text):
        triton.bind("NAME", infer, FLOATS, FLOATS)


def test_isolation_is_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSERVE_ISOLATION", "fibre")
    with pytest.raises(exceptions.PyTritonValidationError, match="'process' or 'thread', got 'fibre'"):
        bind()


def test_the_states_before_a_start() -> None:
    triton = Triton()
    assert (triton.is_alive(), triton.is_connected(), triton.stop()) == (False, False, False)
    with pytest.raises(TimeoutError, match="Triton Inference Server is not ready"):
        triton.connect()


def test_a_config_may_be_changed_until_it_is_bound() -> None:
    config = ModelConfig()
    config.max_batch_size = 0
    with pytest.raises(exceptions.PyTritonBadParameterError):
        bind(config=config)


@pytest.mark.parametrize("url", ["http://elsewhere.example:8000", "ftp://localhost", ""])
def test_a_remote_server_is_named_by_a_url_of_this_machine(url: str) -> None:
    with pytest.raises(PyTritonClientInvalidUrlError):
        RemoteTriton(url)


def test_every_error_of_ours_is_one_of_theirs() -> None:
    for error, expected in {
        errors.StartupError("a"): exceptions.PyTritonRuntimeError,
        errors.ModelUnrecoverable("b"): exceptions.PyTritonUnrecoverableError,
        errors.ConfigError("c"): exceptions.PyTritonValidationError,
        errors.AttachError("d"): TimeoutError,
        errors.Internal("e"): exceptions.PyTritonRuntimeError,
    }.items():
        with pytest.raises(expected, match=str(error)) as raised, exceptions.pytriton_errors():
            raise error
        assert raised.type is expected
    assert issubclass(exceptions.PyTritonUnrecoverableError, UnrecoverableError)


def test_their_errors_have_a_message() -> None:
    error = exceptions.PyTritonError("lost")
    assert (error.message, str(error), error.args) == ("lost", "lost", ("lost",))


def test_requests_and_responses_are_mappings() -> None:
    request = Request({"a": np.ones(1)}, {"p": 1})
    response = Response({"b": np.zeros(1)})
    response["c"] = request["a"]
    del response["b"]
    assert (list(response), response.data == {"c": request.data["a"]}) == (["c"], True)
    assert Response(data=(data := {"a": request["a"]})).data is data
    assert (Requests([request]), Responses([response])) == ([request], [response])
    with request.traced_span(span_name="work"), traced_span(request, span_name="work"):
        pass


CONFIG = TritonModelConfig(
    "m",
    model_version=3,
    max_batch_size=8,
    batcher=DynamicBatcher(
        max_queue_delay_microseconds=5,
        preferred_batch_size=[2, 4],
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=QueuePolicy(max_queue_size=7),
    ),
    instance_group={DeviceKind.KIND_CPU: 2},
    decoupled=True,
    inputs=[TensorSpec("x", (-1,), np.float32, optional=True), TensorSpec("s", (1,), np.bytes_)],
    outputs=[TensorSpec("y", (2, 2), np.int64)],
    response_cache=ResponseCache(False),
)


def test_a_configuration_is_written_and_read_again(tmp_path: Path) -> None:
    generator = ModelConfigGenerator(CONFIG)
    written = generator.get_config()
    assert written["dynamicBatching"]["maxQueueDelayMicroseconds"] == "5"
    assert written["input"][1]["dataType"] == "TYPE_STRING"
    text = generator.to_file(tmp_path / "models" / "config.pbtxt")
    assert 'name: "m"' in text
    assert ModelConfigParser.from_file(config_path=tmp_path / "models" / "config.pbtxt") == CONFIG


@pytest.mark.parametrize(
    "document", [{}, {"name": "m", "input": [{"name": "x"}]}, {"name": "m", "max_batch_size": "many"}]
)
def test_a_configuration_that_cannot_be_read(document: dict[str, Any]) -> None:
    with pytest.raises(exceptions.PyTritonModelConfigError, match="The model configuration "):
        ModelConfigParser.from_dict(document)


def test_a_configuration_that_cannot_be_written() -> None:
    wrong = TritonModelConfig("m", inputs=[TensorSpec("x", (1,), np.complex64)])
    with pytest.raises(exceptions.PyTritonModelConfigError, match=r"'x'.*no v2 datatype"):
        ModelConfigGenerator(wrong).get_config()


def test_the_requests_of_a_warm_up() -> None:
    zeros = WarmupInput(np.float32, (3,), zero_data=True)
    assert generate_warmup_data(zeros, 2).tolist() == [[0.0] * 3] * 2
    requests = generate_warmup_requests([ModelWarmup("w", 2, {"a": zeros, "b": zeros}, 3)], [], [])
    assert generate_warmup_requests(None, [], []) == []
    assert [sorted(request) for request in requests] == [["a", "b"]] * 3
    with pytest.raises(exceptions.PyTritonBadParameterError, match="One of 'zero_data', 'random_data'"):
        generate_warmup_data(WarmupInput(np.float32, (3,)), 2)


def test_urls() -> None:
    url = TritonUrl.from_url("grpc://host")
    assert (url.scheme, url.hostname, url.port) == ("grpc", "host", 8001)
    assert (url.with_scheme, url.without_scheme) == ("grpc://host:8001", "host:8001")
    with pytest.raises(PyTritonClientInvalidUrlError):
        TritonUrl.from_url("ftp://host")


def test_states_in_an_index() -> None:
    states = parse_http_response(
        [{"name": "m", "version": "9", "state": "READY"}, {"name": "m", "version": "10"}, {"name": "n"}]
    )
    assert states == {("m", "9"): ModelState.READY, ("m", "10"): ModelState.LOADING}
    assert state_in(states, "m", "9") is ModelState.READY
    assert state_in(states, "m", None) is ModelState.LOADING
    assert state_in(states, "n", None) is ModelState.UNAVAILABLE


# ---- compat check ----------------------------------------------------------------------------


def test_a_script_in_a_thread_has_its_output_and_its_children() -> None:
    pytest.importorskip("psutil")
    with ScriptThread([sys.executable, "-c", "import time; time.sleep(60)"], name="script") as script:
        assert script.process.children(recursive=True) == []
        script.process.terminate()
    assert (script.is_alive(), script.returncode) == (False, -15)
    with ScriptThread([sys.executable, "-c", "print('a'); print('b'); raise SystemExit(3)"]) as script:
        pass
    assert (script.output, script.returncode) == ("a\nb", 3)


def test_processes_are_told() -> None:
    pytest.importorskip("psutil")
    told: list[int] = []
    monitoring = ProcessMonitoring(os.getpid())
    monitoring.register_custom_monitor(told.append)
    monitoring.dump_state()
    assert told[0] == os.getpid()


def test_container_versions_and_warnings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_PYTORCH_VERSION", "24.10-x")
    assert get_current_container_version() == "24.10"
    readme = tmp_path / "README.md"
    readme.write_text("docker run nvcr.io/nvidia/pytorch:24.10-py3\n")
    verify_docker_image_in_readme_same_as_tested(str(readme), "nvcr.io/nvidia/pytorch:24.10-py3")
    with pytest.raises(AssertionError, match=r"24\.10-py3 != .*24\.11"):
        verify_docker_image_in_readme_same_as_tested(str(readme), "nvcr.io/nvidia/pytorch:24.11-py3")
    assert search_warning_on_too_verbose_log_level("nothing") is None
