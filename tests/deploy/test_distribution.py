"""What is published: the archives hold all of the packages, their page can be read, and each Python that is
here can install and serve them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from serving import JSON_LOG, REPOSITORY, serving

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

PACKAGES = ("gpuserve", "gpuserve_worker")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PREFIX = "Programming Language :: Python :: "
#: Every one of them that a command of that name starts is tried; which, the classifiers say.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MODEL = """
from gpuserve.typed import Float32, batch


@batch(max_batch_size=64)
def double(x: Float32) -> Float32:
    return 2 * x
"""


class Archives(NamedTuple):
    """The wheel and the source archive of what git tracks."""

    wheel: Path
    source: Path


def tracked(*folders: str) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [name for name in done.stdout.split("\0") if name]


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return Archives(*(next(out.glob(pattern)) for pattern in ("*.whl", "*.tar.gz")))


def test_the_wheel_holds_both_packages_with_all_their_files_and_nothing_else(archives: Archives) -> None:
    with zipfile.ZipFile(archives.wheel) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == set(tracked(*PACKAGES))


def test_the_source_archive_is_enough_to_build_from(archives: Archives, tmp_path: Path) -> None:
    with tarfile.open(archives.source) as source:
        source.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    out = tmp_path / "again"
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, folder)
    with zipfile.ZipFile(archives.wheel) as first, zipfile.ZipFile(next(out.iterdir())) as again:
        assert set(first.namelist()) == set(again.namelist())


def test_pip_leaves_no_folder_of_a_build_behind(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in tracked(*PACKAGES, "scripts/packaging", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source)
    assert next(tmp_path.glob("*.whl"))
    assert not (source / "build").exists()


def test_the_page_of_the_project_can_be_read_where_it_is_published(archives: Archives) -> None:
    markdown = pytest.importorskip("readme_renderer.markdown", reason="readme_renderer is not installed")
    with zipfile.ZipFile(archives.wheel) as wheel:
        facts = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        _, _, page = wheel.read(facts).decode().partition("\n\n")
    shown = markdown.render(page)
    assert "<h1" in shown
    assert shown.count("<pre") >= 4


def test_the_classifiers_name_no_python_that_is_not_tried() -> None:
    said = {one.removeprefix(PREFIX) for one in PROJECT["classifiers"] if one.startswith(PREFIX)}
    assert said <= set(PYTHONS)
    assert min(said) == PROJECT["requires-python"].removeprefix(">=")


@pytest.fixture(scope="module")
def has_index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Dependencies can be had here, or the test is skipped."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("asked")), "cloudpickle"], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no package index can be reached")


def interpreter(version: str) -> str:
    """An interpreter that makes environments; a name on PATH may be that of a launcher without one."""
    name = shutil.which(f"python{version}")
    program = f"import ensurepip, venv, sys; assert sys.version.startswith('{version}.')"
    if name is None or subprocess.run([name, "-c", program], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no python{version} with venv on PATH")
    return name


@pytest.mark.parametrize("version", PYTHONS)
def test_a_clean_environment_of_each_python_installs_and_serves_it(
    version: str, archives: Archives, has_index: None, tmp_path: Path
) -> None:
    environment, model = tmp_path / "environment", tmp_path / "double.py"
    run(interpreter(version), "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", archives.wheel)
    run(python, "-m", "pip", "check")
    assert run(environment / "bin" / "gpuserve", "version") == f"gpuserve {PROJECT['version']}\n"
    model.write_text(MODEL)
    with serving(str(environment / "bin" / "gpuserve"), "serve", str(model), *JSON_LOG) as server:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}]}
        url = f"http://{server.http}/v2/models/double/infer"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=10) as got:
            assert json.loads(got.read())["outputs"][0]["data"] == [3.0, 4.0]
