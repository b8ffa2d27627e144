"""The ``trace`` block of a config file, its flags and variables, and what a server needs for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuserve.cli.exit_codes import ExitCode
from gpuserve.config.load import load_file
from gpuserve.config.precedence import from_text
from gpuserve.config.problems import ConfigProblems, Origin
from gpuserve.config.settings.server import ServerSettings, TraceSettings

MODEL = {
    "name": "m",
    "callable": "model.py:predict",
    "inputs": [{"name": "x", "dtype": "FP32", "shape": [1]}],
    "outputs": [{"name": "y", "dtype": "FP32", "shape": [1]}],
}


def written(folder: Path, **trace: object) -> str:
    (folder / "model.py").write_text("def predict(requests):\n    return requests\n")
    path = folder / "config.yaml"
    path.write_text(json.dumps({"server": {"trace": trace}, "models": [MODEL]}))
    return str(path)


def test_file_variable_and_flag(tmp_path: Path) -> None:
    path = written(tmp_path, level=["TIMESTAMPS"], file="t.json", rate=5)
    flag = from_text(("server", "trace", "count"), "7", "--trace-count", Origin.FLAG)
    settings = load_file(path, {"GPUSERVE_SERVER__TRACE__RATE": "9"}, [flag]).settings
    assert settings.trace == TraceSettings(("TIMESTAMPS",), rate=9, count=7, file="t.json")
    assert ServerSettings.from_wire(settings.to_wire()) == settings


@pytest.mark.parametrize(
    ("trace", "text"),
    [
        ({"level": ["TENSORS"]}, "needs a file"),
        ({"level": ["ALL"]}, "server.trace.level"),
        ({"rate": 0}, "server.trace.rate"),
        ({"mode": "zipkin"}, "server.trace.mode"),
        ({"url": "collector:4318"}, "server.trace.url"),
        ({"fille": "x"}, "did you mean 'file'"),
    ],
)
def test_mistakes_are_told_by_their_place(tmp_path: Path, trace: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigProblems, match=text):
        load_file(written(tmp_path, **trace), {})


def test_a_package_that_is_missing_is_told_in_one_sentence(tmp_path: Path) -> None:
    path = written(tmp_path, mode="opentelemetry")
    program = (
        "import sys; sys.modules['opentelemetry.exporter'] = None; "
        f"from gpuserve.cli.app import run; sys.exit(run(['serve', {path!r}]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.BAD_CONFIG
    assert "which are not installed: pip install 'gpuserve[otel]'" in done.stderr
    assert "Traceback" not in done.stderr
