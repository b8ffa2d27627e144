"""``gpuserve top`` at a real terminal, beside a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_file import served
from dev_terminal import Terminal
from ensembles import member
from processes import finished
from serving import GPUSERVE, Addresses


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Addresses]:
    with served(tmp_path, [member("doubled")]) as found:
        yield found


def test_models_are_shown_and_scaled_and_the_terminal_is_as_it_was(server: Addresses, tmp_path: Path) -> None:
    with Terminal(tmp_path, GPUSERVE, "top", "--server", server.http) as top:
        termios.tcsetwinsize(top.fileno(), (24, 80))
        top.wait("doubled")
        top.wait("1/1")
        top.press("+")
        top.wait("scale doubled from 1 to 2 on each device?")
        top.press("y")
        top.wait("2/2")
        top.press("\x1b[C")
        top.wait("cpu#1")
        top.press("q")
        top.press("q")
        assert top.process.wait(20) == 0
        assert top.current_mode == top.mode
        assert top.text.rstrip().endswith(("\x1b[?25h", "\x1b[?1049l")), (
            "the other screen is gone, the cursor back"
        )


@pytest.mark.thorough
def test_a_server_that_ends_is_told_and_ctrl_c_ends_the_picture(tmp_path: Path) -> None:
    with served(tmp_path, [member("doubled")]) as found:
        top = Terminal(tmp_path, GPUSERVE, "top", "--server", found.http)
        top.__enter__()
        top.wait("doubled")
    try:
        top.wait("trying to reconnect")
        top.press("\x03")
        assert top.process.wait(20) == 0
        assert top.current_mode == top.mode
    finally:
        top.__exit__(None, None, None)


@pytest.mark.thorough
def test_scripts_get_a_table_or_json(server: Addresses) -> None:
    def top(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [GPUSERVE, "top", *arguments]
        return finished(command)

    sample = json.loads(top("--once", "--json", "--server", server.http).stdout)
    assert [one["name"] for one in sample["models"]] == ["doubled"]
    table = top("--once", "--server", server.http)
    assert table.returncode == 0
    assert "doubled" in table.stdout
    wrong = top("--sort", "speed")
    assert wrong.returncode == 2
    assert "expected one of model, state, inst" in wrong.stderr
    gone = top("--once", "--server", "localhost:1")
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)


@pytest.mark.thorough
def test_sigterm_gives_the_terminal_back(server: Addresses, tmp_path: Path) -> None:
    with Terminal(tmp_path, GPUSERVE, "top", "--server", server.http) as top:
        top.wait("doubled")
        assert top.end(signal.SIGTERM) == 0
        assert top.current_mode == top.mode
