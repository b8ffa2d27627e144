"""What is written is whole, or it is not there."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from exporting import IMAGE, export, written
from manifests import documents, only
from serving import GPUSERVE

TOKEN = {"access_token": "t" * 32, "restricted_endpoints": ["trace"]}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def to(out: Path | str, config: Path) -> Any:
    return export("kubernetes", config, "--image", IMAGE, "--out", out)


def test_a_second_export_takes_the_place_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert to(out, written(tmp_path)).returncode == 0
    (out / "base" / "mine.txt").write_text("mine")
    before = contents(out)
    assert to(out, written(tmp_path, drain_timeout_s=31)).returncode == 0
    after = contents(out)
    assert after.keys() == before.keys()
    assert after["base/mine.txt"] == b"mine"
    assert b"terminationGracePeriodSeconds: 61" in after["base/deployment.yaml"]


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("", "--out: expected a folder, given ''"),
        ("taken", "cannot be written: not a directory"),
        ("taken/below", "cannot be written: not a directory"),
        ("n" * 300, "cannot be written: file name too long"),
    ],
)
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = written(tmp_path)
    (tmp_path / "taken").write_text("")
    before = contents(tmp_path)
    done = to(out, config)
    assert done.returncode == 2
    assert said in done.stderr
    assert contents(tmp_path) == before


def test_a_place_that_is_taken_leaves_everything_as_it_was(tmp_path: Path) -> None:
    config, out = written(tmp_path), tmp_path / "out"
    (out / "overlays" / "monitoring" / "kustomization.yaml").mkdir(parents=True)
    done = to(out, config)
    assert done.returncode == 2
    assert "kustomization.yaml is a directory" in done.stderr
    assert [one.name for one in out.iterdir()] == ["overlays"]
    assert [one.name for one in (out / "overlays").iterdir()] == ["monitoring"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, exists: bool) -> None:
    """The limit of a file's size is met by some files and not by others."""
    config, out = written(tmp_path), tmp_path / "deep" / "out"
    if exists:
        assert to(out, written(tmp_path, drain_timeout_s=31)).returncode == 0
        config = written(tmp_path)
    before = contents(tmp_path)
    command = ["prlimit", "--fsize=2000", GPUSERVE, "export", "kubernetes", str(config), "--image", IMAGE]
    # No bytecode: the limit would cut the files that Python caches, for every later process.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"--out: {str(out)!r} cannot be written: file too large\n"
    assert contents(tmp_path) == before
    assert (tmp_path / "deep").exists() == exists


def test_a_file_with_a_token_is_for_nobody_else(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        assert to(tmp_path / "out", written(tmp_path, **TOKEN)).returncode == 0
    finally:
        os.umask(umask)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "out" / "base").iterdir()}
    assert modes.pop("config.yaml") == 0o600
    assert set(modes.values()) == {0o644}


def test_a_configuration_of_envoy_with_a_token_is_for_nobody_else(tmp_path: Path) -> None:
    closed = {"access_token": "t" * 32, "restricted_endpoints": ["health"]}
    command = [GPUSERVE, "export", "envoy", str(written(tmp_path, **closed)), "--out", str(tmp_path / "out")]
    assert subprocess.run(command, check=False).returncode == 0
    assert stat.S_IMODE((tmp_path / "out" / "envoy.yaml").stat().st_mode) == 0o600


def test_a_config_that_comes_through_a_pipe_is_whole(tmp_path: Path) -> None:
    config = written(tmp_path, {"callable": "json:loads"})
    piped = subprocess.run(
        [GPUSERVE, "export", "kubernetes", "/dev/stdin", "--image", IMAGE],
        input=config.read_text(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert piped.returncode == 0, piped.stderr
    assert only(documents(piped.stdout), "ConfigMap")["data"]["config.yaml"] == config.read_text()


def test_a_stdout_that_takes_nothing_is_one_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [GPUSERVE, "export", "alerts", str(written(tmp_path))]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "stdout cannot be written: no space left on device\n")
