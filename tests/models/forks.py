"""Forks a child, and says how many sockets the child has, or how the child ends."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuserve.decorators import batch

_PRINT_SOCKETS = """
import os, stat
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
print(sum(map(is_socket, range(256))))
"""


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


@batch
def forked(x: Any) -> Any:
    """The sockets in a forked child, as the exit status it ends with."""
    pid = os.fork()
    if pid == 0:
        os._exit(sum(map(_is_socket, range(256))))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"y": np.full(x.shape, status, np.float32)}


def _leaves(x: Any, in_child: Callable[[], Any]) -> Any:
    """In the child what ``in_child`` returns; in the worker the exit status of the child after its end."""
    pid = os.fork()
    if pid == 0:
        return in_child()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"y": np.full(x.shape, status, np.float32)}


@batch
def returns(x: Any) -> Any:
    return _leaves(x, lambda: {"y": x})


@batch
async def returns_later(x: Any) -> Any:
    return _leaves(x, lambda: {"y": x})


@batch
def raises(x: Any) -> Any:
    return _leaves(x, lambda: 1 / 0)


@batch
def exits(x: Any) -> Any:
    return _leaves(x, lambda: sys.exit(7))


@batch
def executed(x: Any) -> Any:
    """The sockets in a child that runs another program."""
    done = subprocess.run(
        [sys.executable, "-c", _PRINT_SOCKETS], close_fds=False, stdout=subprocess.PIPE, check=True
    )
    return {"y": np.full(x.shape, int(done.stdout), np.float32)}
