"""What goes wrong in a bound callable: one line for the client, the whole for the log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: A program whose callable raises; what its client sees is printed, its log goes to stderr.
PROGRAM = """
import logging, sys
from bound import FLOATS_IN_AND_OUT, Refused, ask, free_server

def lookup(requests):
    raise OSError(2, "No such weights", "/secret/place/weights.bin")

def infer_func(requests):
    return lookup(requests)

{setup}
with free_server() as server:
    server.bind("failing", infer_func, **FLOATS_IN_AND_OUT, isolation="{isolation}")
    server.run()
    for _ in range(2):
        try:
            ask(server, "failing", 1.0)
        except Refused as refused:
            print(refused.status, refused.text)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize(
    "setup", ["", "logging.basicConfig(level=logging.INFO)"], ids=["no logging", "basicConfig"]
)
def test_the_client_gets_the_message_and_the_log_the_traceback(
    tmp_path: Path, isolation: str, setup: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(setup=setup, isolation=isolation))
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["500 [Errno 2] No such weights: 'weights.bin'"] * 2
    assert done.stderr.count("Traceback (most recent call last)") == 2
    assert "in lookup" in done.stderr
    assert "/secret/place/weights.bin" in done.stderr
    assert "the inference callable of model 'failing' raised FileNotFoundError" in done.stderr
    assert ("INFO:gpuserve." in done.stderr) == bool(setup)
