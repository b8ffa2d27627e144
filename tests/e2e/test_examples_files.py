"""The examples of model files: made, checked, served without code, and asked, as their READMEs say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from optional_packages import needs
from processes import finished
from serving import GPUSERVE, JSON_LOG, serving
from test_examples import EXAMPLES, run_client, serve
from test_examples_calls import printed

pytestmark = pytest.mark.thorough


def ran(*command: str) -> str:
    done = finished(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("example", "file"),
    [
        ("onnx", "cities.onnx"),
        pytest.param("pytorch", "smooth.pt2", marks=[pytest.mark.thorough, needs("torch")]),
        pytest.param("sklearn", "flowers.skops", marks=pytest.mark.thorough),
        pytest.param("huggingface", "writer", marks=[pytest.mark.thorough, needs("torch")]),
    ],
)
def test_a_model_file_is_served_as_its_readme_says(
    example: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, readme = str(tmp_path / file), (EXAMPLES / example / "README.md").read_text()
    for line in readme.splitlines():
        if line.startswith("$ export "):
            monkeypatch.setenv(*line.removeprefix("$ export ").split("="))
    ran(sys.executable, str(EXAMPLES / example / "make_model.py"), path)
    assert ran(GPUSERVE, "check", path).replace(str(tmp_path), f"examples/{example}") in readme
    with serving(GPUSERVE, "serve", path, *JSON_LOG) as server:
        assert run_client(example, server) == printed(example)


@pytest.mark.thorough
@needs("torch")
def test_ranks_multiply_together() -> None:
    with serving(*serve("tensor_parallel")) as server:
        assert run_client("tensor_parallel", server) == printed("tensor_parallel")


@pytest.mark.thorough
@needs("torch")
def test_flags_say_what_torchscript_does_not(tmp_path: Path) -> None:
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); from make_model import Smooth; "
        "torch.jit.trace(Smooth().eval(), torch.zeros(2, 16), strict=False).save(sys.argv[2])"
    )
    path = str(tmp_path / "smooth.pt")
    ran(sys.executable, "-W", "ignore", "-c", program, str(EXAMPLES / "pytorch"), path)
    readme = (EXAMPLES / "pytorch" / "README.md").read_text()
    flags = readme.partition("$ gpuserve serve smooth.pt ")[2].partition("\n")[0].split()
    with serving(GPUSERVE, "serve", path, *flags, *JSON_LOG) as server:
        assert run_client("pytorch", server) == printed("pytorch")


# ---- a Triton model repository -------------------------------------------------------------------


MODELS = str(EXAMPLES / "triton_repository" / "models")


def test_the_client_prints_what_the_readme_says() -> None:
    with serving(GPUSERVE, "serve", MODELS, *JSON_LOG) as server:
        assert run_client("triton_repository", server) == printed("triton_repository")
