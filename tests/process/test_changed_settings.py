"""Settings that clients change act in every process of a server, and outlive its front."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_operator import traced
from operated import OperatedServer, Orders, config, model
from processes import wait_until


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
