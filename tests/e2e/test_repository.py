"""Loading, unloading and versions of models, as tritonclient asks for them over either protocol."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from repositories import Client, clients_are_closed, either, entry, refusal, write
from serving import GPUSERVE, Addresses, serving
from tritonclient.grpc import service_pb2 as pb

__all__ = ["clients_are_closed"]  # it is for every test here
NOT_POLLED = "failed to load '{}', failed to poll from model repository"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The file and the addresses of a server that serves "simple" and two versions of "two" at first."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "broken").touch()
    path = write(folder / "config.yaml", *models(folder), **settings())
    with serving(GPUSERVE, "serve", str(path), "--log-format", "json") as addresses:
        yield path, addresses


def settings() -> dict[str, Any]:
    return {"host": "127.0.0.1", "load_at_start": ["simple", "two"]}


def models(folder: Path) -> list[dict[str, Any]]:
    return [
        entry("simple"),
        entry("two", 2.0, version=2),
        entry("two", 11.0, version=11),
        entry("never"),
        entry("sick", broken=str(folder / "broken")),
    ]


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, repository: tuple[Path, Addresses]) -> Iterator[Client]:
    address = repository[1].grpc if request.param == "grpc" else repository[1].http
    with Client(request.param, address) as one:
        yield one


@pytest.fixture(autouse=True)
def _as_it_was(repository: tuple[Path, Addresses]) -> Iterator[None]:
    """Loads again what a test has unloaded or changed. Most have not, and to load takes a second."""
    names = ("simple", "two")
    with Client("grpc", repository[1].grpc) as control:
        before = [_state(control, name) for name in names]
    yield
    with Client("grpc", repository[1].grpc) as control:
        for name, state in zip(names, before, strict=True):
            if _state(control, name) != state:
                control.asked.load_model(name)


def _state(control: Client, name: str) -> Any:
    """Which process serves a model, a new one after each load, and which of its versions are ready."""
    index = [one for one in control.asked.get_model_repository_index().models if one.name == name]
    return control.infer(name).pid if control.asked.is_model_ready(name) else None, index


# ---- versions ---------------------------------------------------------------------------------


def test_the_highest_version_answers_where_none_is_named(client: Client) -> None:
    assert client.infer("two")[::2] == (11.0, "11")
    assert client.infer("two", "2")[::2] == (2.0, "2")
    assert client.infer("two", "11")[::2] == (11.0, "11")


def test_a_large_tensor_goes_to_the_version_that_it_names(client: Client) -> None:
    for version, tag in (("2", 2.0), ("11", 11.0), ("", 11.0)):
        assert client.infer("two", version, width=1 << 16).tag == tag


def test_metadata_and_readiness_know_the_versions(client: Client) -> None:
    assert client.versions("two") == ["2", "11"]
    assert client.versions("two", "2") == ["2"]
    assert [client.asked.is_model_ready("two", one) for one in ("", "2", "11", "3")] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "version", "code", "status", "text"),
    [
        ("absent", "", "NOT_FOUND", 404, "Request for unknown model: 'absent' is not found"),
        (
            "two",
            "3",
            "NOT_FOUND",
            404,
            "Request for unknown model: 'two' version 3 is not found, only versions 2, 11 are",
        ),
        ("never", "", "NOT_FOUND", 404, "Request for unknown model: 'never' has no available versions"),
        ("never", "1", "NOT_FOUND", 404, "Request for unknown model: 'never' version 1 is not found"),
    ],
)
def test_what_is_not_served(
    client: Client, name: str, version: str, code: str, status: int, text: str
) -> None:
    assert refusal(client.infer, name, version) == (either(client, code, status), text)


@pytest.mark.parametrize("version", ["wrong_specification", "1.0", "9223372036854775808", "9" * 5000, "٣"])
def test_a_version_that_is_no_number(repository: tuple[Path, Addresses], version: str) -> None:
    client = Client("grpc", repository[1].grpc)
    code, text = refusal(client.infer, "two", version)
    assert code == "INVALID_ARGUMENT"
    assert text.startswith("failed to get model version from specified version string '")
    assert text.endswith("' (details: stol), version should be an integral value > 0 for model 'two'")


@pytest.mark.parametrize("version", ["-2", "0"])
def test_a_version_below_1(repository: tuple[Path, Addresses], version: str) -> None:
    assert refusal(Client("grpc", repository[1].grpc).infer, "two", version) == (
        "INVALID_ARGUMENT",
        f"invalid model version specified '{version}' , version should be an integral value > 0 "
        "for model 'two'",
    )


# ---- the flow of the model control examples -----------------------------------------------------


def test_a_model_is_loaded_changed_and_unloaded(client: Client) -> None:
    asked = client.asked
    names = {name for name, *_ in client.index()}
    assert {"simple", "two", "never", "sick"} <= names
    assert ("never", "", "", "") in client.index()
    asked.load_model("simple")
    assert asked.is_model_ready("simple")
    code, text = refusal(
        asked.load_model, "simple", config='"parameters": {"config": {{"max_batch_size": "16"}}}'
    )
    assert code == either(client, "INVALID_ARGUMENT", 400)
    assert text.startswith(f"{NOT_POLLED.format('simple')}: Invalid config override: ")
    asked.load_model("simple", config='{"max_batch_size":"16"}')
    assert asked.is_model_ready("simple")
    assert client.max_batch_size("simple") == 16
    asked.unload_model("simple")
    assert not asked.is_model_ready("simple")
    assert ("simple", "1", "UNAVAILABLE", "unloaded") in client.index()
    assert refusal(asked.load_model, "wrong_model_name") == (
        either(client, "NOT_FOUND", 404),
        NOT_POLLED.format("wrong_model_name"),
    )
    asked.load_model("simple")  # as the file has it
    assert client.max_batch_size("simple") == 8


def test_an_unloaded_model_is_known_and_not_served(client: Client) -> None:
    client.asked.unload_model("two", unload_dependents=True)
    assert client.states("two") == {"2": "UNAVAILABLE", "11": "UNAVAILABLE"}
    assert refusal(client.infer, "two")[1].endswith("'two' has no available versions")
    assert refusal(client.infer, "two", "2") == (
        either(client, "UNAVAILABLE", 503),
        "Request for unknown model: 'two' version 2 is not at ready state",
    )
    assert client.asked.is_server_ready()
    client.asked.unload_model("two")  # once more, and one that never was, are no errors
    client.asked.unload_model("absent")


def test_a_model_that_cannot_be_loaded(client: Client) -> None:
    status, text = refusal(client.asked.load_model, "sick")
    assert status == either(client, "INVALID_ARGUMENT", 400)
    assert text.startswith("load failed for model 'sick': version 1 is at UNAVAILABLE state: ")
    assert text.endswith("raised RuntimeError: there are no weights;\n")
    (found,) = [one for one in client.index() if one[0] == "sick"]
    assert found[1:3] == ("1", "UNAVAILABLE")
    assert found[3].endswith("there are no weights")


def test_the_file_is_read_again(client: Client, repository: tuple[Path, Addresses]) -> None:
    path = repository[0]
    before = path.read_text()
    try:
        write(path, entry("simple", 7.0), entry("new", 8.0), entry("two", 9.0, version=12))
        for name in ("simple", "new", "two"):
            client.asked.load_model(name)
        assert [client.infer(name).tag for name in ("simple", "new", "two")] == [7.0, 8.0, 9.0]
        assert client.versions("two") == ["12"]
        assert refusal(client.infer, "two", "2")[1].endswith("version 2 is not at ready state")
        path.write_text("models: [")
        assert refusal(client.asked.load_model, "simple")[1] == NOT_POLLED.format("simple")
        assert client.infer("simple").tag == 7.0
    finally:
        client.asked.unload_model("new")
        path.write_text(before)


def test_versions_and_instances_of_an_override(client: Client) -> None:
    policy = {"versionPolicy": {"specific": {"versions": ["2"]}}}
    client.asked.load_model("two", config=json.dumps(policy))
    assert (client.versions("two"), client.infer("two").tag) == (["2"], 2.0)
    client.asked.load_model("two", config=json.dumps({"version_policy": {"latest": {"num_versions": 1}}}))
    assert client.versions("two") == ["11"]
    nothing = {"version_policy": {"specific": {"versions": [5]}}}
    assert refusal(client.asked.load_model, "two", config=json.dumps(nothing))[1] == (
        "failed to load 'two', no version is available"
    )
    client.asked.load_model("two", config=json.dumps({"instance_group": [{"count": 2, "kind": "KIND_CPU"}]}))
    assert client.versions("two") == ["2", "11"]


def test_a_whole_config_that_was_read_may_be_sent_back(
    client: Client, repository: tuple[Path, Addresses]
) -> None:
    config = Client("http", repository[1].http).asked.get_model_config("two")
    config["dynamic_batching"]["max_queue_delay_microseconds"] = "100"
    client.asked.load_model("two", config=json.dumps(config))
    after = Client("http", repository[1].http).asked.get_model_config("two")
    assert after["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert client.versions("two") == ["2", "11"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"optimization": {"priority": 1}},
            "its config override sets 'optimization', which cannot be changed",
        ),
        ({"ensemble_scheduling": {"step": [{"model_name": "x"}]}}, "sets 'ensemble_scheduling'"),
        ({"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1], "reshape": {}}]}, "'input.reshape'"),
        ({"name": "other"}, "has the name 'other'"),
        (
            {"backend": "onnxruntime"},
            "has the backend 'onnxruntime', but its callable is of backend 'python'",
        ),
        ({"max_batch_size": -1}, "max_batch_size must be an integer of at least 0, got -1"),
        ({"max_batch_size": 2, "dynamic_batching": {"preferred_batch_size": [4]}}, "preferred"),
        ({"instance_group": [{"count": 257}]}, "a model may have 256 instances at most"),
        ({"output": [{"name": "y"}]}, "tensor 'y' needs a data_type"),
    ],
)
def test_overrides_that_cannot_be(client: Client, config: dict[str, Any], text: str) -> None:
    status, told = refusal(client.asked.load_model, "simple", config=json.dumps(config))
    assert status == either(client, "INVALID_ARGUMENT", 400)
    assert text in told
    assert client.infer("simple").tag == 1.0


@pytest.mark.parametrize("config", ["", "[]", "1", '{"max_batch_size":"x"}', '{"no_such": 1}', "[" * 5000])
def test_overrides_that_are_no_config(client: Client, config: str) -> None:
    status, told = refusal(client.asked.load_model, "simple", config=config)
    assert status == either(client, "INVALID_ARGUMENT", 400)
    assert told.startswith(NOT_POLLED.format("simple"))
    assert client.asked.is_server_live()


# ---- what may be asked --------------------------------------------------------------------------


def test_names_that_are_none(client: Client, repository: tuple[Path, Addresses]) -> None:
    asked = Client("grpc", repository[1].grpc).asked
    empty = "Model name cannot be empty. Please enter a valid name to deploy."
    assert refusal(asked.load_model, "") == ("INVALID_ARGUMENT", empty)
    for name in ("../simple", "a/b", ".."):
        told = f"invalid model name '{name}', model name must not contain path traversal characters"
        assert refusal(asked.load_model, name) == ("INVALID_ARGUMENT", told)


def test_files_are_not_taken(repository: tuple[Path, Addresses]) -> None:
    asked = Client("grpc", repository[1].grpc).asked
    for path in ("file:" + "A" * 256, "file:1/../../x", "file:/etc/x"):
        told = refusal(asked.load_model, "simple", config="{}", files={path: b"x"})
        assert told == ("INVALID_ARGUMENT", NOT_POLLED.format("simple"))
    assert asked.is_server_live()
    body = {"parameters": {"config": "{}", "file:1/model.py": "eA=="}}
    assert post(repository[1], "/v2/repository/models/simple/load", body) == (
        400,
        {"error": NOT_POLLED.format("simple")},
    )


def post(addresses: Addresses, path: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(addresses.http, timeout=30)
    connection.request("POST", path, body if isinstance(body, str) else json.dumps(body))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else b""


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (
            "models/simple/load",
            {"parameters": {"x": 1}},
            400,
            "unrecognized load parameter 'x'.",
        ),
        (
            "models/simple/load",
            {"parameters": {"config": {}}},
            400,
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        ("models/simple/load", {"parameters": {"file:x": 1}}, 400, "expected bytes_param."),
        ("models/simple/load", "[]", 400, "must be a JSON object"),
        ("models/simple/load", {"parameters": 1}, 400, "'parameters' of a load or unload request must be"),
        (
            "models/simple/unload",
            {"parameters": {"unload_dependents": 1}},
            400,
            "'unload_dependents' parameter",
        ),
        ("models/simple/unload", {"parameters": {"x": True}}, 400, "unrecognized unload parameter 'x'."),
        ("models/%2e%2e%2fx/load", "", 400, "must not contain path traversal characters"),
        ("mine/index", "", 501, "'repository_name' specification is not supported"),
        ("mine/models/simple/load", "", 501, "'repository_name' specification is not supported"),
    ],
)
def test_http_bodies_and_paths(
    repository: tuple[Path, Addresses], path: str, body: Any, status: int, text: str
) -> None:
    given, told = post(repository[1], f"/v2/repository/{path}", body)
    assert given == status
    assert text in told["error"]


def test_http_answers_with_an_empty_body(repository: tuple[Path, Addresses]) -> None:
    for verb in ("load", "unload"):
        assert post(repository[1], f"/v2/repository/models/simple/{verb}", "") == (200, b"")


@pytest.mark.parametrize(
    ("key", "parameter", "text"),
    [
        (
            "config",
            {"int64_param": 1},
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            "file:1/x",
            {"string_param": "x"},
            "invalid value type for load parameter 'file:1/x', expected bytes_param.",
        ),
        ("other", {"string_param": "x"}, "unrecognized load parameter 'other'."),
    ],
)
def test_grpc_parameters(
    repository: tuple[Path, Addresses], key: str, parameter: dict[str, Any], text: str
) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="simple")
    request.parameters[key].MergeFrom(pb.ModelRepositoryParameter(**parameter))
    with grpc.insecure_channel(repository[1].grpc) as channel, pytest.raises(grpc.RpcError) as raised:
        rpc(channel, "RepositoryModelLoad", request.SerializeToString())
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def rpc(channel: grpc.Channel, method: str, body: bytes) -> bytes:
    reply: bytes = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(body, timeout=30)
    return reply


def test_the_messages_of_kserve(repository: tuple[Path, Addresses]) -> None:
    """``model_name`` is field 1 there, and the responses are ``{model_name: 1, isLoaded: 2}``."""
    body = pb.RepositoryModelLoadRequest(repository_name="simple").SerializeToString()
    with grpc.insecure_channel(repository[1].grpc) as channel:
        for method in ("RepositoryModelUnload", "RepositoryModelLoad"):
            assert rpc(channel, method, body) == b"\x0a\x06simple\x10\x01"
        both = pb.RepositoryModelLoadRequest(repository_name="r", model_name="simple").SerializeToString()
        with pytest.raises(grpc.RpcError, match="'repository_name' specification is not supported"):
            rpc(channel, "RepositoryModelLoad", both)


def test_health_of_single_models(repository: tuple[Path, Addresses]) -> None:
    def check(channel: grpc.Channel, service: str) -> bytes:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        reply: bytes = call(b"\x0a" + bytes([len(service)]) + service.encode(), timeout=30)
        return reply

    with grpc.insecure_channel(repository[1].grpc) as channel:
        assert (check(channel, "model/two"), check(channel, "model/never")) == (b"\x08\x01", b"\x08\x02")


def test_nothing_is_loaded_without_leave(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", entry("simple"), model_control="none")
    with serving(GPUSERVE, "serve", str(path), "--log-format", "json") as addresses:
        for protocol, address in (("grpc", addresses.grpc), ("http", addresses.http)):
            client = Client(protocol, address)
            for call in (client.asked.load_model, client.asked.unload_model):
                code, text = refusal(call, "simple")
                assert code == either(client, "UNAVAILABLE", 503)
                assert text == "explicit model load / unload is not allowed if polling is enabled"
            assert client.index() == [("simple", "1", "READY", "")]
