"""The check that every test is put under, put to the test: it names each kind of thing left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import leaks
import pytest
from processes import wait_until

NO_PATIENCE_S = 0.05
SLEEPER = [sys.executable, "-c", "import os, time; os.close(1); time.sleep(60)", "gpuserve"]
TESTS = Path(__file__).parent.parent


def found_since(before: leaks.Census) -> list[str]:
    return leaks.leaks(before, NO_PATIENCE_S)


@pytest.fixture
def before() -> leaks.Census:
    return leaks.census(os.environ[leaks.MARK])


def test_a_process_that_is_left(before: leaks.Census) -> None:
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()  # it runs: its command line is its own
        found = found_since(before)
        process.kill()
    assert any(line.startswith(f"process {process.pid}: ") for line in found)


def test_a_grandchild_whose_parent_is_gone(before: leaks.Census) -> None:
    start = f"import subprocess; print(subprocess.Popen({SLEEPER!r}, stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True).stdout)
    # The kernel may not show the environment of a process that has just begun.
    wait_until(lambda: found_since(before), "the process is found")
    found = found_since(before)
    os.kill(pid, 9)
    assert [line.split(":")[0] for line in found] == [f"process {pid}"]


@pytest.mark.parametrize("make", [lambda: os.open(os.devnull, os.O_RDONLY), lambda: os.memfd_create("m")])
def test_a_descriptor_that_is_left(before: leaks.Census, make: object) -> None:
    assert callable(make)
    fd = make()
    found = found_since(before)
    os.close(fd)
    assert [line.split(":")[0] for line in found] == [f"descriptor {fd}"]


def test_a_descriptor_whose_number_is_used_for_something_else(before: leaks.Census) -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    earlier = leaks.census(before.mark)
    os.dup2(memfd := os.memfd_create("another"), fd)
    os.close(memfd)
    found = found_since(earlier)
    os.close(fd)
    assert [line.split(":")[0] for line in found] == [f"descriptor {fd}"]


@pytest.mark.parametrize(("name", "is_ours"), [("nvidia0", False), ("nvidiactl", False), ("nvidia-x", True)])
def test_nodes_of_nvidias_driver_are_open_to_the_end_of_whoever_used_cuda(
    before: leaks.Census, tmp_path: Path, name: str, is_ours: bool
) -> None:
    (tmp_path / "dev").mkdir()
    fd = os.open(tmp_path / "dev" / name, os.O_RDWR | os.O_CREAT)
    found = found_since(before)
    os.close(fd)
    assert bool(found) == is_ours


@pytest.mark.parametrize(
    ("name", "is_ours"), [("cuda.shm.0.{:x}.1", False), ("cuda.shm.gpuserve-{:x}", True)]
)
def test_shared_memory_that_cuda_leaves_for_the_killed_is_told_from_ours(
    before: leaks.Census, name: str, is_ours: bool
) -> None:
    path = Path("/dev/shm", name.format(os.getpid()))
    path.touch()
    found = found_since(before)
    path.unlink()
    assert found == ([f"shared memory {path}"] if is_ours else [])


def test_shared_memory_that_is_left(before: leaks.Census) -> None:
    path = Path("/dev/shm", leaks.own_name())
    path.touch()
    found = found_since(before)
    path.unlink()
    assert found == [f"shared memory {path}"]


@pytest.mark.parametrize("folder", ["", "gpuserve"])
def test_a_socket_file_that_is_left(before: leaks.Census, folder: str) -> None:
    path = Path(tempfile.gettempdir(), leaks.own_name(), folder)
    if folder:  # in the runtime folder of a test
        path.mkdir(parents=True)
        path /= "control"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    found = found_since(before)
    path.unlink()
    if folder:
        path.parent.rmdir()
        path.parent.parent.rmdir()
    assert found == [f"socket file {path}"]


def test_the_fixture_fails_the_test_that_leaks_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_two.py").write_text(
        "import os\n\ndef test_leaks():\n    os.open(os.devnull, 0)\n\ndef test_clean():\n    assert True\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "LEAK_PATIENCE_S": "0.1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert "2 passed, 1 error" in run.stdout
    assert "the test left behind:" in run.stdout
    assert os.devnull in run.stdout
