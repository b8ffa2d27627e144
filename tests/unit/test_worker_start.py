"""How a worker starts: a process leaves all as it is for user code, a thread may not start at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from gpuserve.core.errors import StartupError
from gpuserve.supervisor.workers import worker_thread as threads
from gpuserve.supervisor.workers.worker_thread import start_thread

#: As the process begins; without descriptors it ends with a usage error, after all is imported.
PROGRAM = """
import gc, json, os, sys
usual, before = gc.get_threshold(), list(sys.path)
sys.argv = ["gpuserve_worker"]
from gpuserve_worker.__main__ import main
status = main()
same = gc.isenabled() and gc.get_threshold() == usual and sys.path == before
print(json.dumps([status, same, gc.get_freeze_count() > 0, os.environ["OPENBLAS_THREAD_TIMEOUT"]]))
"""


@pytest.mark.parametrize(("given", "expected"), [({}, "20"), ({"OPENBLAS_THREAD_TIMEOUT": "26"}, "26")])
def test_a_worker_starts_without_spinning_and_the_collector_is_as_ever_for_user_code(
    given: dict[str, str], expected: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"}
    command, variables = [sys.executable, "-c", PROGRAM], {**environment, **given}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [2, True, True, expected]


def refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def starve(*_: object) -> int:
    raise OSError(24, "Too many open files")


def test_no_descriptor_is_left_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StartupError, match="cannot start a worker thread: can't start new thread"):
            start_thread("m/cpu#0", {})
    with monkeypatch.context() as patch:
        patch.setattr(threads.os, "dup", starve)
        with pytest.raises(StartupError, match="Too many open files"):
            start_thread("m/cpu#0", {})
    assert sorted(os.listdir("/proc/self/fd")) == before
