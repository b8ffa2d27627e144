"""What is shown while a server starts."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import pytest

from gpuserve.cli.live.startup_view import LogView, TableView, client_command, ready_text
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.settings.values import AccessRule
from gpuserve.model.spec import InstanceSpec, ModelSpec, SequenceBatching
from gpuserve_worker.protocol.tensor import TensorSpec

HTTP, GRPC = {"http": "http://h:1"}, {"grpc": "h:2"}


def spec(*inputs: TensorSpec, max_batch_size: int = 0) -> ModelSpec:
    instance = InstanceSpec("cpu#0", "cpu", {})
    return ModelSpec("m", inputs, (TensorSpec("y", "FP32", (-1,)),), max_batch_size, (instance,))


def x(datatype: str = "FP32", *dims: int) -> ModelSpec:
    return spec(TensorSpec("x", datatype, dims or (2,)))


def words(addresses: dict[str, str], model: ModelSpec) -> list[str]:
    """The words of the client's command; a program of Python is valid."""
    found = shlex.split(str(client_command(addresses, model)))
    if found[:2] == ["python3", "-c"]:
        compile(found[2], "command", "exec")
    else:
        assert found[0] == "curl"
    return found


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_log_line_for_each_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gpuserve")
    clock, shown = Clock(), []
    view = LogView(shown.append, clock)
    view.instance_changed("m", "cpu#0", "cpu", "LOADING", "importing")
    clock.now_s = 2.5
    view.instance_changed("m", "cpu#0", "cpu", "READY", "")
    view.instance_changed("m", "cpu#0", "cpu", "WAITING", "")
    view.server_ready({"http": "http://h:1"})
    assert caplog.messages == ["importing", "ready after 2.5 s"]
    assert shown == [{"http": "http://h:1"}]


def test_a_later_start_of_an_instance_is_timed_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gpuserve")
    clock = Clock()
    view = LogView(lambda addresses: None, clock)
    for state in ("LOADING", "READY", "STOPPING", "STOPPED", "LOADING", "FAILED", "LOADING", "READY"):
        view.instance_changed("m", "cpu#0", "cpu", state, "")
        clock.now_s += 1.0
    assert caplog.messages == ["loading", "ready after 1.0 s", "loading", "loading", "ready after 1.0 s"]


def test_the_table_counts_seconds_until_ready() -> None:
    clock, shown = Clock(), []
    view = TableView(LogView(shown.append, clock), clock)
    view.open()
    try:
        view.instance_changed("a", "cpu#0", "cpu", "LOADING", "importing")
        view.instance_changed("b", "cpu#0", "cpu", "LOADING", "importing")
        clock.now_s = 1.5
        view.instance_changed("a", "cpu#0", "cpu", "READY", "")
        clock.now_s = 4.0
        columns = [list(column.cells) for column in view.table().columns]
    finally:
        view.close()
    assert columns[3:] == [["ready", "importing"], ["1.5", "4.0"]]
    view.server_ready({})
    assert shown == [{}]


def test_a_small_request_is_a_curl_command() -> None:
    model = spec(TensorSpec("x", "FP32", (2,)), TensorSpec("s", "BYTES", (-1,)), max_batch_size=4)
    command = words(HTTP | GRPC, model)
    assert command[:4] == ["curl", "-s", "http://h:1/v2/models/m/infer", "-d"]
    assert json.loads(command[4])["inputs"] == [
        {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 1.0]},
        {"name": "s", "shape": [1, 1], "datatype": "BYTES", "data": ["hello"]},
    ]


@pytest.mark.parametrize(
    ("addresses", "model", "part"),
    [
        (HTTP | GRPC, x("UINT8", 3, 224, 224), "np.ones([3, 224, 224], np.uint8)"),
        (HTTP, x("BF16", 1), "np.ones([1], ml_dtypes.bfloat16)"),
        (GRPC, x("BOOL", 1), "np.ones([1], bool)"),
        (GRPC, spec(), "client.infer_sample(**{})"),
    ],
)
def test_any_other_request_is_a_python_command(addresses: Any, model: ModelSpec, part: str) -> None:
    assert part in words(addresses, model)[2]


def test_the_addresses_are_shown_when_ready_and_a_model_without_tensors_has_a_command() -> None:
    assert "/v2/models/m/infer" in str(client_command(HTTP, spec()))
    shown = ready_text(GRPC | {"metrics": "http://h:3/metrics"}, [x()])
    assert shown.startswith("Ready.\n  gRPC     h:2\n  metrics  http://h:3/metrics\n")
    assert client_command({}, x()) is None


def test_the_command_has_the_certificate_and_a_place_for_the_token() -> None:
    def command(name: str, **settings: Any) -> str:
        addresses = {"http": "https://h:1", "grpc": "grpcs://h:2"}
        shown = ready_text(addresses, [x(name, 1)], "", ServerSettings(**settings))
        return shown.partition("Try it")[2]

    tls: Any = {"tls_certfile": "/a b/c.pem", "tls_keyfile": "/k.pem"}
    token: Any = {"access_token": "t", "restricted_endpoints": ("inference",)}
    assert "  curl -s --cacert '/a b/c.pem' https://h:1/v2/models/m/infer -d" in command("FP32", **tls)
    said = command("FP32", **tls, **token)
    assert said.startswith(" from another shell, with the access token as $TOKEN:\n")
    assert '/c.pem\' -H "triton-access-token: $TOKEN" https://' in said
    rule = AccessRule(("inference",), "t", "key")
    assert ' -s -H "key: $TOKEN" https' in command("FP32", access_rules=(rule,))
    assert command("FP16", **tls) == command("FP32", tls_client_ca="/ca.pem", **tls) == ""
    assert command("FP16", tls_ports=("grpc",), **tls).startswith(" from another shell:\n  python3")


def test_a_stream_is_asked_for_as_one() -> None:
    stream = dataclasses.replace(x(), decoupled=True)
    command = words(HTTP | GRPC, stream)
    assert command[:4] == ["curl", "-sN", "http://h:1/v2/models/m/generate_stream", "-d"]
    assert json.loads(command[4]) == {"x": [1.0, 1.0]}
    assert "DecoupledModelClient('grpc://h:2', 'm')" in words(GRPC, stream)[2]
    assert client_command(HTTP, dataclasses.replace(x("FP16"), decoupled=True)) is None


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_model_of_sequences_is_asked_for_a_whole_one(decoupled: bool) -> None:
    model = dataclasses.replace(x(), sequence=SequenceBatching("direct"), decoupled=decoupled)
    whole = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    body = json.loads(words(HTTP, model)[4])
    assert (body if decoupled else body["parameters"]).items() >= whole.items()
    assert "'sequence_end': True" in words(GRPC, model)[2]
