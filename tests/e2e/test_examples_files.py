"""The examples of model files: made, checked, served without code, and asked, as their READMEs say."""

from __future__ import annotations

import subprocess
import sys
"""The examples of models that are files: made by their scripts, served, asked, as their READMEs say."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from serving import GPUSERVE, JSON_LOG, serving
from test_examples import CLIENT_TIMEOUT_S, EXAMPLES, run_client
from test_examples_calls import printed


def ran(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("example", "file"),
    [("onnx", "cities.onnx"), pytest.param("pytorch", "smooth.pt2", marks=pytest.mark.thorough)],
)
def test_a_model_file_is_served_as_its_readme_says(example: str, file: str, tmp_path: Path) -> None:
    path, readme = str(tmp_path / file), (EXAMPLES / example / "README.md").read_text()
    ran(sys.executable, str(EXAMPLES / example / "make_model.py"), path)
    assert ran(GPUSERVE, "check", path).replace(str(tmp_path), f"examples/{example}") in readme
    with serving(GPUSERVE, "serve", path, *JSON_LOG) as server:
        assert run_client(example, server) == printed(example)


@pytest.mark.thorough
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
from test_examples import EXAMPLES, run_client
from test_examples_calls import printed

pytestmark = pytest.mark.thorough
TRAINING_TIMEOUT_S = 100.0


def made(example: str, tmp_path: Path) -> Path:
    """A copy of the example whose model has been made."""
    folder = tmp_path / example
    shutil.copytree(EXAMPLES / example, folder, ignore=shutil.ignore_patterns("writer", "*.skops"))
    subprocess.run(
        [sys.executable, str(folder / "train.py")],
        check=True,
        timeout=TRAINING_TIMEOUT_S,
        capture_output=True,
    )
    return folder


def checked(file: Path) -> str:
    done = subprocess.run(
        [GPUSERVE, "check", str(file)], check=True, timeout=60, capture_output=True, text=True
    )
    return done.stdout


def test_a_file_of_scikit_learn_names_flowers(tmp_path: Path) -> None:
    folder = made("sklearn", tmp_path)
    readme = (folder / "README.md").read_text()
    assert checked(folder / "flowers.skops").rpartition("\n/")[0] in readme
    with serving(GPUSERVE, "serve", str(folder / "config.yaml"), *JSON_LOG) as server:
        assert run_client("sklearn", server) == printed("sklearn")
        (line,) = run_client("sklearn", server, "5.0,3.4,1.5,0.2")
    assert line.startswith("setosa ")


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")
def test_a_folder_of_hugging_face_tells_a_rhyme(tmp_path: Path) -> None:
    folder = made("huggingface", tmp_path)
    readme = (folder / "README.md").read_text()
    assert checked(folder / "writer").rpartition("\n/")[0] in readme
    body = {"prompt": "The grand", "parameters": {"max_new_tokens": 6}}
    with serving(GPUSERVE, "serve", str(folder / "config.yaml"), *JSON_LOG) as server:
        assert run_client("huggingface", server) == printed("huggingface")
        url = f"http://{server.http}/v2/models/writer/generate_stream"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
            events = [json.loads(one.removeprefix(b"data: ")) for one in answer if one.startswith(b"data: ")]
    assert printed("huggingface")[0].startswith("The grand" + "".join(one["text"] for one in events))
    assert events[-1]["finish_reason"] == "length"
