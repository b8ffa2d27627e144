"""The code of the tutorial and of the README does what they say."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
import urllib.request
from pathlib import Path

import pytest
from serving import GPUSERVE, JSON_LOG, REPOSITORY, serving

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
