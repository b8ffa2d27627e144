"""``gpuserve run`` before it hands over to the program; ``e2e/test_pytriton_programs.py`` has the rest."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from gpuserve.cli.app import run
from gpuserve.cli.exit_codes import ExitCode
from gpuserve.compat.pytriton.alias import IMPORTABLE


class Replaced(Exception):
    """This process would be another one now."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments that ``execve`` was called with."""
    calls: list[Any] = []

    def execve(*arguments: Any) -> None:
        calls.extend(arguments)
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("GPUSERVE_ISOLATION", raising=False)
    return calls


@pytest.mark.parametrize(
    ("given", "run_as", "isolation"),
    [
        (["p.py"], ["p.py"], None),
        (["p.py", "--isolation", "x", "-m", "-h"], ["p.py", "--isolation", "x", "-m", "-h"], None),
        (["-m", "a.b", "--port", "1"], ["-m", "a.b", "--port", "1"], None),
        (["--isolation", "process", "-m", "a.b"], ["-m", "a.b"], "process"),
        (["--isolation=thread", "p.py", "--", "x"], ["p.py", "--", "x"], "thread"),
    ],
)
def test_what_is_executed(
    executed: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    run_as: list[str],
    isolation: str | None,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    with pytest.raises(Replaced):
        run(["run", *given])
    executable, command, environment = executed
    assert (executable, command) == (sys.executable, [sys.executable, *run_as])
    assert environment.get("GPUSERVE_ISOLATION") == isolation
    assert environment["PYTHONPATH"] == f"{IMPORTABLE}{os.pathsep}mine"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "Missing argument"),
        (["--isolation", "fibre", "p.py"], "expected thread or process, given 'fibre'"),
    ],
)
def test_usage_errors(
    executed: list[Any], capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    assert run(["run", *given]) == ExitCode.USAGE
    assert says in capsys.readouterr().err
    assert executed == []
