"""What a ``model.py`` asks of its server: other models, their loading, its log, its metrics."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from operated import OperatedServer
from processes import wait_until
from python_backend import entry, tensor

#: ``TritonError.INVALID_ARG`` and so on.
NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED = 2, 3, 4, 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    config = tmp_path_factory.mktemp("python_backend_calls") / "config.yaml"
    models = [entry(name) for name in ("asks", "asks_async", "asked", "repeat")]
    settings = {"model_control": "explicit", "log_level": "debug"}
    config.write_text(json.dumps({"server": settings, "models": models}))
    with OperatedServer(config) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: OperatedServer) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.addresses["gRPC"]) as made:
        yield made


def order(client: grpcclient.InferenceServerClient, do: str, **more: Any) -> Any:
    text = np.array([json.dumps({"do": do, **more}).encode()], np.object_)
    result = client.infer("asks", [tensor("ORDER", "BYTES", text)], client_timeout=30)
    return json.loads(result.as_numpy("SAID")[0])


ASKED = {"model_name": "asked", "requested_output_names": ["Y"]}


@pytest.mark.parametrize("do", ["exec", "in_thread"])
def test_a_model_asks_another(client: grpcclient.InferenceServerClient, do: str) -> None:
    assert order(client, do, **ASKED) == {"Y": ["2.0", "4.0"]}
    assert order(client, do, **ASKED, model_version=1) == {"Y": ["2.0", "4.0"]}
    assert order(client, "chain", **ASKED) == {"Y": ["4.0", "8.0"]}


def test_the_request_says_what_it_was_given(client: grpcclient.InferenceServerClient) -> None:
    given = {"request_id": "r7", "timeout": 5_000_000, "parameters": {"a": 1, "b": "é", "c": True}}
    said = order(client, "exec", **ASKED | given | {"requested_output_names": ["SAID"]})
    assert json.loads(said["SAID"][0][2:-1].encode().decode("unicode_escape")) == [
        "r7",
        5_000_000,
        given["parameters"],
        ["SAID"],
    ]


def test_a_request_that_fails_says_why(client: grpcclient.InferenceServerClient) -> None:
    assert order(client, "exec", **ASKED, x=[-1]) == [INVALID_ARG, "nothing below 0"]
    assert order(client, "exec", **ASKED | {"model_name": "nope"})[0] == NOT_FOUND
    code, text = order(client, "exec", **ASKED | {"requested_output_names": ["Z"]})
    assert (code, "'Z'" in text) == (INVALID_ARG, True)
    code, text = order(client, "exec", **ASKED, input="W")
    assert (code, "W" in text) == (INVALID_ARG, True)
    assert order(client, "exec", **ASKED, model_version=7)[0] in {NOT_FOUND, UNAVAILABLE}
    assert order(client, "stream", **ASKED | {"model_name": "nope"})[0][0] == NOT_FOUND


def test_a_stream_comes_response_by_response(client: grpcclient.InferenceServerClient) -> None:
    assert order(client, "stream", **ASKED) == [{"Y": ["2.0", "4.0"]}]
    repeat = {"model_name": "repeat", "requested_output_names": [], "input": "COUNT", "dtype": "int32"}
    assert order(client, "stream", **repeat, x=[3]) == [{"INDEX": [str(index)]} for index in range(3)]
    assert order(client, "first_of_stream", **repeat, x=[100_000]) == {"INDEX": ["0"]}
    assert order(client, "stream", **repeat, x=[0]) == []
    code, text = order(client, "exec", **repeat, x=[3])
    assert (code, "decoupled" in text) == (UNSUPPORTED, True)


def test_a_child_process_is_told_to_use_threads(client: grpcclient.InferenceServerClient) -> None:
    code, text = order(client, "in_fork", **ASKED)
    assert (code, "forked from a worker" in text) == (UNAVAILABLE, True)
    assert order(client, "exec", **ASKED) == {"Y": ["2.0", "4.0"]}


def test_the_process_is_as_that_of_tritons_stub(client: grpcclient.InferenceServerClient) -> None:
    assert order(client, "process") == [[""], "", {}, False]
    assert order(client, "bytes") == ["r", {"Y": ["2.0", "4.0"]}, "no"]


def test_wrong_arguments_raise_as_pb_utils_does(client: grpcclient.InferenceServerClient) -> None:
    parts = {"model_name": "m", "requested_output_names": ["Y"], "inputs": []}
    lacking = [{key: value for key, value in parts.items() if key != one} for one in parts]
    wrong = [*lacking, {**parts, "request_id": None}, {**parts, "timeout": "1"}]
    assert [one.partition(":")[0] for one in order(client, "requests", of=wrong)] == ["TypeError"] * 5
    request, response, *logs = order(client, "no_tensor")
    assert request == (
        "TritonModelException: Input tensor for request with id 'r' and model name 'm' should not be empty."
    )
    assert response == "TritonModelException: Output tensor for inference response should not be empty."
    assert [one.partition(":")[0] for one in logs] == ["TypeError"] * 2


def test_a_coroutine_asks_several_at_once(client: grpcclient.InferenceServerClient) -> None:
    x = np.array([1, 2], np.float32)
    result = client.infer("asks_async", [tensor("X", "FP32", x)], client_timeout=30)
    assert result.as_numpy("Y").tolist() == (sum(2 * (x + n) for n in range(3)) + 8 + 3 * 2).tolist()


def test_a_model_loads_and_unloads_others(client: grpcclient.InferenceServerClient) -> None:
    assert order(client, "models", verb="ready", model_name="repeat") is True
    assert order(client, "models", verb="ready", model_name="repeat", model_version="7") is False
    assert order(client, "models", verb="unload", model_name="repeat") is None
    assert order(client, "models", verb="ready", model_name="repeat") is False
    assert order(client, "models", verb="load", model_name="repeat") is None
    assert order(client, "models", verb="ready", model_name="repeat") is True
    said = order(client, "models", verb="load", model_name="nope")
    assert said.startswith("raised: Failed to load model: failed to load 'nope'")
    said = order(client, "models", verb="load", model_name="repeat", files={"file:1/model.py": "x"})
    assert "which this server does not take" in said
    said = order(client, "models", verb="ready", model_name="repeat", model_version="x")
    assert said.startswith("raised: Failed to check model readiness")


def test_log_lines_have_their_level_model_and_instance(
    server: OperatedServer, client: grpcclient.InferenceServerClient
) -> None:
    order(client, "log", text="a line")
    expected = {
        "a line log_info": "INFO",
        "a line log_warn": "WARNING",
        "a line log_error": "ERROR",
        "a line log_verbose": "DEBUG",
        "a line log": "WARNING",
    }

    def found() -> dict[str, str]:
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
        of_model = [one for one in lines if one.get("model") == "asks" and one.get("instance") == "cpu#0"]
        return {one["msg"]: one["level"].upper() for one in of_model if one["msg"] in expected}

    wait_until(lambda: found() == expected, "the lines")


def test_metrics_are_on_the_page_of_the_server(
    server: OperatedServer, client: grpcclient.InferenceServerClient
) -> None:
    def make(kind: str, call: str, *values: float, **more: Any) -> Any:
        return order(
            client, "metrics", kind=kind, name=f"late_{kind.lower()}", call=call, values=values, **more
        )

    def page() -> str:
        with urllib.request.urlopen(f"http://{server.addresses['metrics']}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    assert make("COUNTER", "increment", 2, labels={"a": "b"}) == 2
    assert make("COUNTER", "increment", 1, labels={"a": "b"}) == 3
    assert make("GAUGE", "set", -1.5) == -1.5
    assert make("HISTOGRAM", "observe", 0.5, buckets=[0.1, 1]) is None
    assert "never becomes less" in make("COUNTER", "increment", -1)
    assert "only a gauge" in make("COUNTER", "set", 1)
    assert "a counter already" in order(
        client, "metrics", kind="GAUGE", name="late_counter", call="set", values=[1]
    )
    found = page()  # has the values when execute has returned
    for line in ('late_counter{a="b"} 3.0', "late_gauge -1.5", 'late_histogram_bucket{le="1.0"} 1.0'):
        assert line in found
    assert 'orders_total{model="asks"}' in found
