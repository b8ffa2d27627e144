"""``gpuserve config``: every value with what gave it, as YAML that says the same once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import REPOSITORY

from gpuserve.cli.app import run
from gpuserve.cli.check_command import effective_yaml
from gpuserve.config.effective import effective
from gpuserve.config.load import load_data, load_file
from gpuserve.config.settings.values import MASK
from gpuserve.config.yaml_document import parse

FILE = """\
server:
  http_port: 9000
  log_level: debug
  access_rules: [{groups: [health], token: hidden}]
models:
  - name: double
    callable: doubling.py:double
    kwargs: {api_key: hidden, deep: [{Password: hidden}], rate: 3}
"""
MODEL = """
from gpuserve import Tensor


def double(api_key, deep, rate):
    return lambda requests: requests


double.inputs = [Tensor(name="x", dtype="float32", shape=(-1,))]
double.outputs = [Tensor(name="y: z", dtype=bytes, shape=())]
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "doubling.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(FILE)
    return str(tmp_path / "config.yaml")


def said(path: str, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert run(["config", path, "--json", *flags]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    return {one.pop("key"): one for one in values}


def test_origins_of_values(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSERVE_SERVER__LOG_LEVEL", "warning")
    monkeypatch.setenv("GPUSERVE_MODELS__DOUBLE__MAX_BATCH_SIZE", "8")
    found = said(path, capsys, "--grpc-port", "7001", "--no-attachable")
    assert found["server.http_port"] == {"value": 9000, "origin": "file", "where": path, "line": 2}
    assert found["server.grpc_port"] == {"value": 7001, "origin": "flag", "where": "--grpc-port"}
    assert found["server.attachable"] == {"value": False, "origin": "flag", "where": "--no-attachable"}
    variable = {"value": "warning", "origin": "environment", "where": "GPUSERVE_SERVER__LOG_LEVEL"}
    assert found["server.log_level"] == variable
    assert found["models[0].max_batch_size"]["where"] == "GPUSERVE_MODELS__DOUBLE__MAX_BATCH_SIZE"
    assert found["server.metrics_port"] == {"value": 8002, "origin": "default"}
    name = {"value": "x", "origin": "attribute", "where": "doubling.py:double"}
    assert found["models[0].inputs[0].name"] == name
    assert found["models[0].queue.policy.timeout_action"]["origin"] == "default"


def test_secrets_are_masked_everywhere(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(path, capsys, "--access-token", "hidden", "--restricted-endpoints", "[inference]")
    assert found["server.access_token"]["value"] == MASK
    assert "hidden" not in json.dumps(found)
    assert found["models[0].kwargs"]["value"] == {"api_key": MASK, "deep": [{"Password": MASK}], "rate": 3}
    assert run(["config", path]) == 0
    assert "hidden" not in capsys.readouterr().out


def test_brief_leaves_defaults_out(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", path, "--brief"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "server:"
    assert not any(line.endswith("# default") for line in lines)
    assert lines[1].split() == ["http_port:", "9000", "#", f"{path}:2"]
    assert next(line for line in lines if "y: z" in line).strip().startswith('- name: "y: z"')


@pytest.mark.parametrize(
    "example",
    ["linear", "ensemble", "sequences", "streaming", "calls_between_models", "optional_inputs", "gpu"],
)
def test_what_is_printed_says_the_same_once_more(example: str) -> None:
    folder = REPOSITORY / "examples" / example
    first = load_file(str(folder / "config.yaml"), {})
    printed = effective_yaml(one for one in effective(first) if one.origin is not None)
    again = load_data(parse(printed).data, "printed", str(folder), {})
    assert (again.settings, again.models) == (first.settings, first.models)
