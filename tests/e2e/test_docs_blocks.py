"""Every block of Python in the docs has its imports, and runs. What is a reader's own there, such as a model
or a server, comes from ``yours``; a block that asks a server, or needs what a machine may not have, is named
in ``ELSEWHERE`` with who runs its like, and here its names alone are looked at.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from serving import REPOSITORY

import gpuserve
from gpuserve import Tensor

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


def blocks(page: Path) -> list[Block]:
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


BLOCKS = [block for page in PAGES for block in blocks(page)]


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
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F822,F823", "-q",
             "--config", f"builtins = {known}", "-"],
            input=block.code, capture_output=True, text=True, check=False,
        )  # fmt: skip
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
