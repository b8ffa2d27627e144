"""Settings of a running server that the config file says otherwise: those that change, and the others."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_operator import Operator, fifo, operated, traced
from operated import TIMEOUT_S, OperatedServer, Orders, config, model
from processes import wait_until
from repositories import clients_are_closed, entry
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here


def test_what_cannot_change_is_named_and_the_rest_is_applied(tmp_path: Path) -> None:
    with operated(tmp_path, entry("m"), log_level="info") as operator:
        settings = {"grpc_response_compression": "high", "name": "other", "access_token": "s3cret"}
        operator.reload(entry("m", 2.0), log_level="warning", **settings)
        operator.wait_said('server.name: cannot change while the server runs: "gpuserve" stays')
        wait_until(lambda: operator.client().infer("m").tag == 2.0, "the model is reloaded")
        told = "\n".join(one["msg"] for one in operator.server.messages())
        assert "server.access_token: cannot change while the server runs\n" in told + "\n"
        assert 'grpc_response_compression: cannot change while the server runs: "none" stays' in told
        assert "model m is reloaded" not in told  # by the level that holds now
        assert "s3cret" not in told
        operator.server.replace_front()
        assert "the front died" in "\n".join(operator.server.log)
        operator.reload(entry("m", 2.0), log_level="error")
        wait_until(lambda: log_settings(operator)["log_warning"] is False, "the front has the level")
        operator.server.replace_front()
        assert log_settings(operator)["log_warning"] is False  # so has its successor


def log_settings(operator: Operator) -> Any:
    with operator.server.client() as client:
        return json.loads(client.get("/v2/logging").body)


@pytest.mark.thorough
def test_settings_of_the_front_hold_at_once(tmp_path: Path) -> None:
    two = entry("m", instances=[{"device": "cpu", "count": 2}])
    with operated(tmp_path, two) as operator:
        server, client = operator.server, operator.client("http")
        with pytest.raises(InferenceServerException, match="not allowed"):
            client.asked.load_model("m")
        file = tmp_path / "trace.json"
        trace = {"level": ["TIMESTAMPS"], "rate": 1, "file": str(file)}
        changed = {"metrics_summaries": True, "model_control": "explicit", "max_connection_age_s": 0.2}
        kept = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
        assert ready(kept) == 200
        operator.reload(two, trace=trace, **changed)
        operator.wait_said("config reload: server.trace is as the file says now")
        client.asked.load_model("m")
        client.infer("m")
        wait_until(lambda: bool(traced(file)), "a request is traced")
        assert server.metric("nv_inference_request_summary_us_count", model="m") >= 1
        wait_until(lambda: is_closed_by_age(server), "a new connection has an age")
        assert ready(kept) == 200  # not one that was there before
        kept.close()
        other = tmp_path / "other.json"
        operator.reload(two, trace={**trace, "file": str(other)})
        operator.wait_said("config reload: server.trace is as the file says now", 2)
        n_traces = len(traced(file))
        client = operator.client("http")
        client.infer("m")
        wait_until(lambda: bool(traced(other)), "a request is traced elsewhere")
        assert len(traced(file)) == n_traces
        with pytest.raises(InferenceServerException, match="not allowed"):
            client.asked.load_model("m")
        assert server.metric("nv_inference_request_summary_us_count", model="m") == 0


@pytest.mark.thorough
def test_limits_of_connections_hold_for_those_that_are_open(tmp_path: Path) -> None:
    with operated(tmp_path, entry("m")) as operator:
        kept = http.client.HTTPConnection(operator.server.addresses["HTTP"], timeout=TIMEOUT_S)
        with contextlib.closing(kept):
            assert ready(kept) == 200
            operator.reload(entry("m"), idle_timeout_s=0.2)
            assert kept.sock is not None
            assert kept.sock.recv(1) == b""


def ready(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/v2/health/ready")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def is_closed_by_age(server: OperatedServer) -> bool:
    """Whether a connection that is made now is told to go within a second."""
    connection = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        ready(connection)
        first = connection.sock
        for _ in range(50):
            if connection.sock is not first:
                return True
            signal.sigtimedwait([], 0.02)
            ready(connection)
    return False


@pytest.mark.thorough
def test_readiness_goes_by_the_numbers_that_hold_now(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    two = entry("m", broken=str(broken), instances=[{"device": "cpu", "count": 2}])
    with operated(tmp_path, two) as operator:
        server = operator.server
        broken.touch()
        os.kill(server.workers[0], signal.SIGKILL)
        wait_until(lambda: server.metric("gpuserve_worker_up", model="m") == 1, "one of two is up")
        assert server.status("/v2/health/ready") == 200
        operator.reload(two, min_ready_instances=2)
        wait_until(lambda: server.status("/v2/health/ready") == 400, "one is not enough")
        operator.reload(two, min_ready_instances=0)
        wait_until(lambda: server.status("/v2/health/ready") == 200, "it is enough")


@pytest.mark.thorough
def test_times_hold_from_now_on(tmp_path: Path) -> None:
    gate = fifo(tmp_path, "gate")
    with operated(tmp_path, entry("m", 1.0)) as operator:
        operator.reload(entry("m", 2.0, load_fifo=str(gate)), load_timeout_s=0.2, lame_duck_s=0.3)
        operator.wait_said("could not be started: not loaded within 0.2 s")
        operator.wait_said("config reload: server.lame_duck_s is 0.3 now, it was 0")
        assert operator.client().infer("m").tag == 1.0
        assert operator.server.end() == 0
        operator.wait_said("stopping: requests are served for 0.3 s more")


# ---- settings that clients change: in every process, and beyond the front ------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OperatedServer]:
    entry = model("m", Orders(tmp_path / "orders"))
    path = config(tmp_path, entry, trace={"file": str(tmp_path / "trace.json"), "rate": 1})
    with OperatedServer(path).until_ended() as running:
        yield running


def update(server: OperatedServer, path: str, **settings: Any) -> Any:
    """POST settings; all of them come back."""
    address = f"http://{server.addresses['HTTP']}{path}"
    with urllib.request.urlopen(address, json.dumps(settings).encode(), timeout=10) as answer:
        return json.loads(answer.read())


def test_log_settings_act_in_the_supervisor_and_outlive_the_front(server: OperatedServer) -> None:
    update(server, "/v2/logging", log_warning=False)
    server.replace_front()
    assert not any("the front died" in line for line in server.log)
    assert update(server, "/v2/logging")["log_warning"] is False
    update(server, "/v2/logging", log_warning=True)
    server.replace_front()
    server.wait_log("the front died")


@pytest.mark.thorough
def test_trace_settings_and_traces_outlive_the_front(server: OperatedServer, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    update(server, "/v2/models/m/trace/setting", trace_level=["TIMESTAMPS"])
    assert server.infer("m", 1.0).status == 200
    wait_until(lambda: traced(file) == [1], "one trace is written")
    server.replace_front()
    assert server.infer("m", 1.0).status == 200
    wait_until(lambda: len(traced(file)) == 2, "the trace of the next front is written behind it")
    assert len(set(traced(file))) == 2
