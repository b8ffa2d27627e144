"""A child process: how it is started, how its death is known, how it is ended. Nothing of what it does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from gpuserve.errors import StartupError
from gpuserve.supervisor.channel import channel_pair


class Child(Protocol):
    """What a keeper needs of what it keeps; a process, or what stands for one in this process."""

    @property
    def pidfd(self) -> int:
        """Becomes readable when it ends."""

    @property
    def output(self) -> int | None:
        """The read end of its stdout and stderr, or None where it has ours."""

    @property
    def pid(self) -> int:
        """The process it is, or is part of."""

    @property
    def killed(self) -> bool:
        """After ``exit_reason()``: whether a signal ended it."""

    @property
    def exit_status(self) -> int | None:
        """After ``exit_reason()``: its status; None or negative where it did not exit by itself."""

    def exit_reason(self) -> str:
        """After its end: why. Waits for it where that takes no time."""

    def kill(self) -> None:
        """End it now."""

    def close(self) -> None:
        """Close what the supervisor holds of it."""


class ChildProcess:
    """One child, in a session of its own so that Ctrl-C in a terminal reaches only the supervisor.

    ``pidfd`` becomes readable when it dies, within a millisecond, whatever descriptors its own
    children hold. ``output`` is the read end of its stdout and stderr, or None where it has ours.
    """

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, output: int | None) -> None:
        self._process = process
        self.pidfd = pidfd
        self.output = output

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def killed(self) -> bool:
        """Whether a signal ended it."""
        return (self._process.returncode or 0) < 0

    @property
    def exit_status(self) -> int | None:
        """The status after death, negative for a signal."""
        return self._process.returncode

    def exit_reason(self) -> str:
        """After death: "exit status 1" or "signal SIGKILL". Reaps the process."""
        status = self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
        return f"signal {-status}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Close what the supervisor holds of a dead child."""
        os.close(self.pidfd)
        if self.output is not None:
            os.close(self.output)


def spawn(
    module: str,
    channels: int,
    *,
    environment: Mapping[str, str] | None = None,
    relay_output: bool,
) -> tuple[ChildProcess, list[socket.socket]]:
    """Start ``python -m module FD…``, one descriptor for each channel; the child and our ends of them.

    ``-P`` keeps the current directory off its import path: a stray ``numpy.py`` of the user's must
    not break a worker. With ``relay_output`` its stdout and stderr come to ``ChildProcess.output``.

    Raises:
        StartupError: the process could not be started; nothing stays open.
    """
    try:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            pairs = [channel_pair() for _ in range(channels)]
            for our_end, their_end in pairs:
                ours.enter_context(our_end)
                theirs.enter_context(their_end)
            output, their_output = os.pipe() if relay_output else (None, None)
            if output is not None and their_output is not None:
                ours.callback(os.close, output)
                theirs.callback(os.close, their_output)
                os.set_blocking(output, False)
            fds = [their_end.fileno() for _, their_end in pairs]
            command = [sys.executable, "-P", "-m", module, *map(str, fds)]
            process = _start(command, fds, their_output, environment)
            ours.pop_all()
    except OSError as error:
        raise StartupError(f"cannot start a process of {module}: {error.strerror}") from error
    return ChildProcess(*process, output), [our_end for our_end, _ in pairs]


def _start(
    command: Sequence[str], fds: Sequence[int], output: int | None, environment: Mapping[str, str] | None
) -> tuple[subprocess.Popen[bytes], int]:
    """The process and its pidfd."""
    process = subprocess.Popen(
        command,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **environment} if environment else None,
        start_new_session=True,
    )
    try:
        return process, os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise
