"""Which transports there are, and what is told of one that cannot be had."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gpuserve import Server
from gpuserve.config.load import load_file
from gpuserve.config.messages import ConfigProblems
from gpuserve.errors import ConfigError
from gpuserve.transports import TRANSPORTS

MISSING = r"transport h2corn needs a package that is missing: pip install 'gpuserve\[h2corn\]'"


@pytest.fixture
def without_h2corn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which that package cannot be found."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "h2corn" else find(name))


def config(tmp_path: Path, transport: str) -> str:
    file = tmp_path / "config.yaml"
    model = "{name: m, callable: pkg.mod:f, inputs: [], outputs: [{name: y, dtype: FP32, shape: [1]}]}"
    file.write_text(f"server: {{transport: {transport}}}\nmodels: [{model}]\n")
    return str(file)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_those_that_there_are(tmp_path: Path, name: str) -> None:
    Server(transport=name)
    assert load_file(config(tmp_path, name), {}).settings.transport == name


@pytest.mark.usefixtures("without_h2corn")
def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=MISSING):
        Server(transport="h2corn")
    with pytest.raises(ConfigProblems, match=MISSING):
        load_file(config(tmp_path, "h2corn"), {})


def test_one_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="transport is one of native, h2corn, grpcio, given 'http3'"):
        Server(transport="http3")
