"""The code of the tutorial and of the README does what they say."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from processes import finished
from serving import GPUSERVE, JSON_LOG, REPOSITORY, serving

import gpuserve
from gpuserve import Tensor
from gpuserve.testing import ModelCallError, TestClient


def blocks(page: str, language: str) -> list[str]:
    text = (REPOSITORY / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def files(page: str, folder: Path) -> None:
    """Every block that begins with ``# <file name>`` as that file."""
    for language in ("python", "yaml"):
        for block in blocks(page, language):
            named = re.match(r"# (\w+\.(?:py|yaml))\n", block)
            if named:
                (folder / named[1]).write_text(block)


def test_the_tutorial(tmp_path: Path) -> None:
    files("docs/tutorial.md", tmp_path)
    console = next(block for block in blocks("docs/tutorial.md", "console") if "sentiment/infer" in block)
    sent, answer = re.search(r"-d '(.*?)'\n(.*)", console, re.DOTALL).groups()  # type: ignore[union-attr]
    with serving(GPUSERVE, "serve", str(tmp_path / "config.yaml"), *JSON_LOG) as server:
        url = f"http://{server.http}/v2/models/sentiment/infer"
        with urllib.request.urlopen(url, sent.encode(), timeout=10) as got:
            assert json.loads(got.read()) == json.loads(answer)


def test_the_program_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files("docs/tutorial.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        test = importlib.import_module("test_program")
        test.test_the_models()
        with TestClient(importlib.import_module("program").server, workers=True) as client:
            assert client.models == ("Identity", "Linear", "Reverse")
            assert client.infer("Linear", x=[[1.0, 2.0, 3.0]])["y"].tolist() == [[6.0, 6.0]]
            with pytest.raises(ModelCallError, match="numbers that are none"):
                client.infer("Linear", x=[[math.nan, 1.0, 1.0]])
    finally:
        for name in ("program", "test_program"):
            sys.modules.pop(name, None)


def test_the_callable_of_the_readme(tmp_path: Path) -> None:
    files("README.md", tmp_path)
    with serving(GPUSERVE, "serve", f"{tmp_path}/double.py", *JSON_LOG) as server:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}]}
        url = f"http://{server.http}/v2/models/double/infer"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=10) as got:
            assert json.loads(got.read())["outputs"][0]["data"] == [3.0, 4.0]


# ---- every block of Python -----------------------------------------------------------------------


PAGES = (*sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "README.md")
#: A phrase of a block, and why it is not run here.
ELSEWHERE = {
    "OpenAI(": "tests/e2e/test_openai.py asks with that client",
    "cuda_shared_memory.create": "it needs a GPU; tests/device/test_cuda_regions.py has one",
    "torch.cuda.CUDAGraph(": "it needs a GPU",
    ".begin_capture()": "it needs a GPU; tests/device/test_device_outputs.py serves it",
    "pin_memory()": "it needs a GPU; tests/device/test_on_demand_memory.py has a model that sleeps",
    "Server.attach(": "tests/process/test_attach.py attaches programs",
    "gpuserve.events(": "tests/process/test_event_stream.py listens",
    "update_log_settings(": "tests/e2e/test_tritonclient.py asks with that client",
    "service_config.json": "tests/deploy/test_envoy_config.py reads what is exported",
    "InferenceServerClient(": "tests/e2e/test_docs.py sends the request",
    "ModelClient(": "tests/e2e/test_client.py asks with that client",
    "triton_python_backend_utils": "tests/e2e/test_iterative_sequences.py serves such a model",
    "from program import": "tests/e2e/test_docs.py runs the program",
    "pytest.mark.gpuserve(": "tests/e2e/test_pytest_plugin.py has a run with the plugin",
}


class Block(NamedTuple):
    page: str
    line: int
    code: str

    @property
    def elsewhere(self) -> bool:
        return any(phrase in self.code for phrase in ELSEWHERE)


def python_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [
        Block(
            page.name,
            text.count("\n", 0, one.start()) + 2,
            re.sub(f"^{one[1]}", "", one[2], flags=re.MULTILINE),
        )
        for one in found
    ]


BLOCKS = [block for page in PAGES for block in python_blocks(page)]


def yours() -> dict[str, Any]:
    """What a reader has: functions, a model, tensors, a server with two models that does not run."""
    tensors = [Tensor(name="x", dtype="float32", shape=(-1,))]
    server = gpuserve.Server(http_port=0, grpc_port=0, metrics_port=0)
    server.bind("linear", str, tensors, tensors)
    return {
        "server": server, "inputs": tensors, "outputs": tensors, "better": str, "callable_with_a_lock": str,
        "infer": str, "model": str, "next_word": str, "load": str, "search": str, "run": str, "client": None,
        "build_model": str,
        "DeviceLost": RuntimeError, "x": np.zeros(3, np.float32),
    }  # fmt: skip


def test_every_name_of_every_block_is_imported_or_a_readers_own() -> None:
    known = json.dumps(sorted(yours()))
    for block in BLOCKS:
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F822,F823", "-q"]
        done = finished([*command, "--config", f"builtins = {known}", "-"], input=block.code)
        assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}"


@pytest.mark.parametrize(
    "block", [one for one in BLOCKS if not one.elsewhere], ids=lambda one: f"{one.page}:{one.line}"
)
def test_a_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, f"{block.page}:{block.line}", "exec"), {"__name__": "docs", **yours()})


def test_who_runs_the_others_is_there() -> None:
    for phrase, where in ELSEWHERE.items():
        assert any(phrase in one.code for one in BLOCKS), f"no block has {phrase!r} any more"
        for path in re.findall(r"tests/\S+", where):
            assert (REPOSITORY / path.rstrip(";")).exists(), path
