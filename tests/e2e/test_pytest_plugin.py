"""The plugin of pytest: its fixtures in a project of its own, and in the examples."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import finished
from serving import REPOSITORY

PLUGIN = "gpuserve.testing.pytest_plugin"
#: Named here, and no other is looked for: an installation may be older than its entry point.
LOADED = ("-p", PLUGIN, "-p", "pytest_timeout")
MODEL = """
import os

from gpuserve.typed import Int64, batch


@batch
def pid(x: Int64) -> Int64:
    return x * 0 + os.getpid()
"""
FIRST = """
import os

import pytest

from gpuserve.typed import Int32, batch


def test_in_this_process(gpuserve_client):
    assert gpuserve_client.infer("pid", x=[[1]])["OUTPUT_1"].tolist() == [[os.getpid()]]


def test_in_workers(gpuserve_server, request):
    (worker,) = gpuserve_server.infer("pid", x=[[1]])["OUTPUT_1"][0]
    assert worker != os.getpid()
    assert gpuserve_server.addresses["grpc"].startswith("127.0.0.1:")
    request.config.stash.setdefault(KEY, worker)


KEY = pytest.StashKey[int]()


@batch
def half(x: Int32) -> Int32:
    return x // 2


@pytest.mark.gpuserve(target=half)
def test_a_marker_goes_before_the_setting(gpuserve_client):
    assert gpuserve_client.models == ("half",)
    assert gpuserve_client.infer(x=[[4]])["OUTPUT_1"].tolist() == [[2]]


@pytest.mark.gpuserve
def test_a_marker_without_a_target(gpuserve_client):
    raise AssertionError("its fixture fails")
"""
SECOND = """
from test_first import KEY


def test_the_server_is_the_one_of_the_session(gpuserve_server, request):
    (worker,) = gpuserve_server.infer(x=[[1]])["OUTPUT_1"][0]
    assert request.config.stash[KEY] == worker
"""


def run_pytest(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LOADED, *arguments]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return finished(command, cwd=folder, env=environ)


def test_fixtures_of_a_project(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ngpuserve_target = src/model.py:pid\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/model.py").write_text(MODEL)
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    done = run_pytest("--strict-markers", folder=tmp_path)
    assert "4 passed, 1 error" in done.stdout, done.stdout
    assert "expected @pytest.mark.gpuserve(target), given 0 targets" in done.stdout


@pytest.mark.thorough
def test_a_project_that_does_not_say_what_to_ask(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(gpuserve_client): ...\n")
    done = run_pytest(folder=tmp_path)
    assert "gpuserve_client has no target: mark the test with" in done.stdout
    assert "pytest_plugin.py" not in done.stdout


def test_the_plugin_is_an_entry_point_and_imports_nothing_that_a_test_may_not_need() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"gpuserve": PLUGIN}
    program = f"import {PLUGIN}, sys; print(*sys.modules)"
    done = finished([sys.executable, "-c", program], check=True)
    modules = done.stdout.split()
    assert sorted(one for one in modules if one.startswith("gpuserve")) == [
        "gpuserve",
        "gpuserve.core",
        "gpuserve.core.lazy_names",
        "gpuserve.core.version",
        "gpuserve.testing",
        PLUGIN,
    ]
    assert "numpy" not in modules


@pytest.mark.thorough
def test_the_tests_of_the_examples() -> None:
    done = run_pytest("examples", folder=REPOSITORY)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(".") >= len([*REPOSITORY.glob("examples/*/test_*.py")]) > 0
