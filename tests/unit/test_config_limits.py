"""Configurations that would take a machine's memory or time: refused soon, and in one sentence."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuserve.config.load import MAX_CONFIG_NBYTES, load_file
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.triton.folders import model_folder, model_folders
from gpuserve.model.rules import MAX_DEPTH

TENSORS = {
    "inputs": [{"name": "x", "dtype": "FP32", "shape": [1]}],
    "outputs": [{"name": "y", "dtype": "FP32", "shape": [1]}],
}


@contextmanager
def soon(limit_s: float) -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < limit_s


def refusal(path: Path) -> str:
    with pytest.raises(ConfigProblems) as refused:
        load_file(str(path), {})
    return str(refused.value)


def chain(length: int) -> dict[str, Any]:
    """A config of so many ensembles, each of which asks the next one, and of a model at the end."""
    models: list[dict[str, Any]] = [{"name": f"e{length}", "callable": "pkg.mod:f", **TENSORS}]
    for number in range(length):
        steps = [{"model": f"e{number + 1}", "inputs": {"x": "x"}, "outputs": {"y": "y"}}]
        models.append({"name": f"e{number}", "ensemble": {"steps": steps}, **TENSORS})
    return {"models": models}


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    path.write_text("\n".join(lines))
    with soon(20.0):
        assert "more than 1000000 values, those behind aliases included" in refusal(path)


def test_aliases_that_nest_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 5000)]
    path.write_text("\n".join(lines))
    assert "nested more than 100 deep" in refusal(path)


def test_a_file_of_200_mib_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with path.open("wb") as file:
        file.write(b"models:\n")
        file.seek(200 << 20)
        file.write(b"\n")
    with soon(2.0):
        assert f"is larger than a config may be, {MAX_CONFIG_NBYTES >> 20} MiB" in refusal(path)


def test_ensembles_may_be_nested_so_deep_and_no_deeper(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(chain(MAX_DEPTH)))
    assert len(load_file(str(path), {}).models) == MAX_DEPTH + 1
    path.write_text(json.dumps(chain(MAX_DEPTH + 1)))
    text = refusal(path)
    assert f"by model 'e1' the ensemble has more than {MAX_DEPTH} others below one another" in text
    assert text.count("below one another") == 1


@pytest.mark.thorough
def test_a_chain_of_2000_ensembles_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(chain(2000)))
    assert "below one another" in refusal(path)


def test_a_large_config_pbtxt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    with (tmp_path / "m" / "config.pbtxt").open("wb") as file:
        file.truncate(200 << 20)
    with soon(2.0):
        (folder,) = model_folders(str(tmp_path))
    assert folder.config is None
    assert folder.problem == "is larger than a config.pbtxt may be, 4 MiB"


def test_a_model_is_not_without_versions_because_no_descriptor_is_left(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            model_folder(str(tmp_path), "m")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
