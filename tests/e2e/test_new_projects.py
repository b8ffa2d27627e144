"""Projects that ``gpuserve new`` makes: each is served, asked as its README says, and passes its own test."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from dev_terminal import DevTerminal
from processes import finished
from serving import GPUSERVE
from typer.testing import CliRunner

from gpuserve.cli.app import build_app
from gpuserve.cli.new import new_command
from gpuserve.cli.new.new_command import KINDS, ProjectError, ProjectKind, create_project

PLUGIN = "gpuserve.testing.pytest_plugin"
#: Named here only where the installation is older than the entry point.
LOADED = [] if any(one.value == PLUGIN for one in entry_points(group="pytest11")) else ["-p", PLUGIN]
TIMEOUT_S = 110.0
#: What the answer to the command of each README has in it.
ANSWERS = {
    "batch": '"data":[2.0,4.0]',
    "stream": 'data: {"model_name":"my-model","model_version":"1","word":"three"}',
    "torch": '"name":"scores","datatype":"FP32","shape":[1,3]',
    "onnx": '"data":[2.0,4.0,6.0,8.0]',
    "openai": '"content":" there"',
    "triton": '"data":[2.0,4.0]',
}


def command_of(readme: str) -> str:
    """The request that a README has, as a shell takes it."""
    return next(one for one in re.findall(r"\$ (.*?)\n(?:\$|```)", readme, re.S) if one.startswith("curl"))


def ask(command: str) -> str:
    done = finished(["bash", "-c", command], check=True)
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_whole(kind: str, tmp_path: Path) -> None:
    made = create_project(str(tmp_path / "my model"), kind)
    assert {"README.md", ".gitignore", "test_model.py"} < set(made)
    texts = {one: (tmp_path / "my model" / one).read_text() for one in made if not one.endswith(".onnx")}
    assert [one for one, text in texts.items() if re.search("@[A-Z]+@", text)] == []
    for path in (one for one in made if one.endswith(".py")):
        compile(texts[path], path, "exec")
        assert max(map(len, texts[path].splitlines())) <= 88
    assert "my_model" in command_of(texts["README.md"])
    assert f"gpuserve dev {KINDS[kind].target}\n" in texts["README.md"]
    assert (tmp_path / "my model" / KINDS[kind].target).exists()


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(), ["new", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return -1, str(done.exception)
    return done.exit_code, done.output


def test_what_to_do_next_is_said_in_three_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = run("my demo")
    assert (status, text.splitlines()[1:]) == (
        0,
        ["Next:", "  cd 'my demo'", "  gpuserve dev config.yaml", "  pytest"],
    )
    absent = ProjectKind("", library="no_such_module", extra="pytorch")
    monkeypatch.setitem(new_command.KINDS, "torch", absent)
    status, text = run("other", "--kind", "torch")
    assert text.splitlines()[-1].endswith("not installed: pip install 'gpuserve[pytorch]'")


def test_nothing_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert run("demo")[0] == 0  # it was empty
    config = (tmp_path / "demo" / "config.yaml").read_text()
    text = "demo is not empty: expected a new or an empty folder"
    assert run("demo", "--kind", "triton") == (-1, text)
    (tmp_path / "file").touch()
    with pytest.raises(ProjectError, match=r"file: expected a new or an empty folder, not a directory"):
        create_project("file", "batch")
    assert (tmp_path / "demo" / "config.yaml").read_text() == config
    status, text = run("more", "--kind", "tensorflow")
    assert (status, "given 'tensorflow'" in text, (tmp_path / "more").exists()) == (2, True, False)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_runs_as_it_is(kind: str, tmp_path: Path) -> None:
    if not KINDS[kind].is_installed():
        pytest.skip(f"{KINDS[kind].library} is not installed")
    folder = tmp_path / "my-model"
    subprocess.run([GPUSERVE, "new", "my-model", "--kind", kind], cwd=tmp_path, check=True, timeout=TIMEOUT_S)
    with DevTerminal(folder, KINDS[kind].target) as dev:
        dev.ready()
        readme = (folder / "README.md").read_text()
        command = command_of(readme).replace("localhost:8000", dev.address)
        asked = ask(command)
        assert ANSWERS[kind] in asked
        assert dev.end() == 0
    tests = [sys.executable, "-m", "pytest", "-q", *LOADED, "-W", "error"]
    done = finished(tests, cwd=folder)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    checks = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,I,UP,B", "."]
    subprocess.run(checks, cwd=folder, check=True, timeout=TIMEOUT_S)


@pytest.mark.thorough
def test_the_onnx_file_is_what_its_script_writes(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    create_project(str(tmp_path / "demo"), "onnx")
    before = (tmp_path / "demo" / "model.onnx").read_bytes()
    subprocess.run([sys.executable, "make_model.py"], cwd=tmp_path / "demo", check=True, timeout=TIMEOUT_S)
    assert (tmp_path / "demo" / "model.onnx").read_bytes() == before
