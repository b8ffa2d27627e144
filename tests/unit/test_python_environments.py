"""Which environments a worker can run in, what they are lent, and what is said of the others."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from gpuserve.backends.environments import (
    EnvironmentProblem,
    InterpreterInfo,
    cached_folder,
    check_interpreter,
    environment_variables,
    find_interpreter,
    link_packages,
    probe_interpreter,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_path_stands_for_an_interpreter_or_is_refused(tmp_path: Path) -> None:
    python = program(tmp_path / "env/bin/python", "exit 0")
    assert find_interpreter(str(tmp_path / "env")) == find_interpreter(python) == python
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.tar.gz").write_text("text")
    for name, said in {
        "nope": "does not exist",
        "empty": "no bin/python",
        "no.tar.gz": "be unpacked",
    }.items():
        with pytest.raises(EnvironmentProblem, match=said):
            find_interpreter(str(tmp_path / name))


@pytest.mark.parametrize("through_link", [False, True])
def test_an_archive_writes_nothing_outside_of_its_folder(tmp_path: Path, through_link: bool) -> None:
    (tmp_path / "outside").mkdir()
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as made:
        if through_link:
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "outside")
            made.addfile(link)
        written = tarfile.TarInfo("link/file" if through_link else "../" * 9 + f"{tmp_path}/outside/file")
        written.size = 4
        made.addfile(written, io.BytesIO(b"text"))
    with pytest.raises(EnvironmentProblem, match="cannot be unpacked"):
        find_interpreter(str(tmp_path / "env.tar.gz"))
    assert not list((tmp_path / "outside").iterdir())


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="does not run as Python: it has broken"):
        probe_interpreter(program(tmp_path / "python", "echo it has broken >&2; exit 1"))
    with pytest.raises(EnvironmentProblem, match="does not run as Python"):
        probe_interpreter(program(tmp_path / "true", "exit 0"))


@pytest.mark.parametrize(
    ("version", "missing", "said"),
    [
        ((3, 10), (), "is Python 3.10, and workers need 3.11"),
        ((3, 12), ("msgpack",), "-m pip install msgpack"),
        ((3, 12), ("numpy", "msgpack"), "no numpy and no msgpack"),
        ((3, 12), (), ""),
        ((3, 11), ("numpy", "msgpack"), ""),
    ],
)
def test_what_an_environment_lacks_is_lent_or_named(
    version: tuple[int, int], missing: tuple[str, ...], said: str
) -> None:
    found = InterpreterInfo(version, f"cpython-3{version[1]}", missing)
    with pytest.raises(EnvironmentProblem, match=said) if said else contextlib.nullcontext():
        check_interpreter("/env/bin/python", found, "cpython-311")


def test_nothing_is_lent_but_what_is_needed() -> None:
    lent = Path(link_packages(sys.executable))
    assert {one.name for one in lent.iterdir()} == {"gpuserve", "gpuserve_worker"}
    assert link_packages(sys.executable) == str(lent)
    program = [sys.executable, "-P", "-c", "import gpuserve_worker; print(gpuserve_worker.__file__)"]
    variables = environment_variables(sys.executable, str(lent))
    assert subprocess.check_output(program, env=variables, text=True, timeout=60).startswith(str(lent))


def test_a_folder_is_made_once_whoever_comes() -> None:
    made: list[Path] = []
    gate = threading.Event()

    def make(folder: Path) -> None:
        made.append(folder)
        gate.wait(10)
        (folder / "done").touch()

    threads = [threading.Thread(target=cached_folder, args=("kind", "one", make)) for _ in range(3)]
    for one in threads:
        one.start()
    gate.set()
    for one in threads:
        one.join()
    assert len(made) == 1
    assert (cached_folder("kind", "one", make) / "done").exists()
    assert cached_folder("kind", "other", lambda _: None) != cached_folder("kind", "one", make)


def test_what_was_not_made_whole_is_not_there(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise EnvironmentProblem("broken")

    with pytest.raises(EnvironmentProblem, match="broken"):
        cached_folder("kind", "one", fail)
    left = os.listdir(cache / "gpuserve/environments/kind")
    assert [one for one in left if not one.endswith(".lock")] == []
    cached_folder("kind", "one", lambda _: None)
