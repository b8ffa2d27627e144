"""Where the sockets of a server lie: in a folder of this user alone, or under abstract names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuserve.supervisor.control.attach_protocol import local_addresses, private_owner
from gpuserve.supervisor.control.operator_client import ControlName, listening_names

NAME = b"\0gpuserve/0/port-1"
NOBODY = 65534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # whose path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_a_file_of_the_user_comes_before_the_abstract_name(base: Path) -> None:
    assert local_addresses("port-1", NAME) == [NAME]
    assert not any(base.iterdir())
    expected = [f"{base}/gpuserve/port-1".encode(), NAME]
    assert local_addresses("port-1", NAME, create=True) == expected
    assert local_addresses("port-1", NAME) == expected
    assert private_owner(str(base / "gpuserve")) == os.geteuid()


def test_a_path_that_is_too_long_is_not_used(base: Path) -> None:
    longest = 107 - len(f"{base}/gpuserve/")
    assert len(local_addresses("x" * longest, NAME, create=True)) == 2
    assert local_addresses("x" * (longest + 1), NAME, create=True) == [NAME]
    assert local_addresses("é" * (longest // 2 + 1), NAME, create=True) == [NAME]


@pytest.mark.parametrize("value", [None, "", "run/user/0", ".", "/does/not/exist", "/dev/null"])
def test_without_a_runtime_folder_there_is_the_abstract_name(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert local_addresses("port-1", NAME, create=True) == [NAME]


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702, pytest.param(None, marks=ROOT_ONLY)])
def test_a_base_of_another_user_or_that_others_may_write_to_is_not_used(base: Path, mode: int | None) -> None:
    if mode is None:
        os.chown(base, NOBODY, NOBODY)
    else:
        base.chmod(mode)
    assert local_addresses("port-1", NAME, create=True) == [NAME]


@ROOT_ONLY
def test_a_base_that_cannot_be_written_to_is_not_used(base: Path) -> None:
    base.chmod(0o500)
    os.chown(base, NOBODY, NOBODY)
    child = os.fork()
    if not child:
        os.setuid(NOBODY)
        os._exit(local_addresses("port-1", NAME, create=True) != [NAME])
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "what", ["link", "file", "open to others", pytest.param("another's", marks=ROOT_ONLY)]
)
def test_a_folder_that_is_not_of_this_user_alone_is_not_used(base: Path, what: str) -> None:
    folder = base / "gpuserve"
    if what == "link":
        (base / "elsewhere").mkdir(0o700)
        folder.symlink_to("elsewhere")
    elif what == "file":
        folder.touch(0o700)
    else:
        folder.mkdir(0o700)
        if what == "another's":
            os.chown(folder, NOBODY, NOBODY)
        else:
            folder.chmod(0o750)
    assert local_addresses("port-1", NAME, create=True) == [NAME]
    assert private_owner(str(folder)) in {None, NOBODY}


def test_files_are_found_in_the_kernels_table(base: Path) -> None:
    name = ControlName(os.geteuid(), "::1", 8000)
    path, _ = (os.fsdecode(one) for one in name.addresses())
    assert path == f"{base}/gpuserve/control-::1:8000"
    row = "0000000000000000: 00000002 00000000 00010000 0005 01 4711"
    table = f"{row} {path}\n{row} {base}/gpuserve/port-8000\n{row} {base}/control-::1:8000\n"
    (found,) = listening_names(table)
    assert (found, str(found), found.encode()) == (name._replace(path=path), "[::1]:8000", path.encode())
    (base / "gpuserve").chmod(0o755)
    assert listening_names(table) == []
