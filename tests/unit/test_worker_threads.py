"""A worker thread that cannot be started leaves nothing open."""

from __future__ import annotations

import os
import threading

import pytest

from gpuserve.core.errors import StartupError
from gpuserve.supervisor.workers import worker_thread as threads
from gpuserve.supervisor.workers.worker_thread import start_thread


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
