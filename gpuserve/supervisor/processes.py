"""A child process: how it is started, how its death is known, how it is ended. Nothing of what it does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from gpuserve.errors import StartupError


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
    arguments: Sequence[str],
    pass_fds: Sequence[int],
    *,
    environment: Mapping[str, str] | None = None,
    relay_output: bool,
) -> ChildProcess:
    """Start ``python -m module`` with these descriptors.

    ``-P`` keeps the current directory off its import path: a stray ``numpy.py`` of the user's must
    not break a worker. With ``relay_output`` its stdout and stderr come to ``ChildProcess.output``.

    Raises:
        StartupError: the process could not be started.
    """
    output, their_output = os.pipe() if relay_output else (None, None)
    if output is not None:
        os.set_blocking(output, False)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            pass_fds=tuple(pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=their_output,
            stderr=their_output,
            env={**os.environ, **environment} if environment else None,
            start_new_session=True,
        )
    except OSError as error:
        if output is not None:
            os.close(output)
        raise StartupError(f"cannot start a process of {module}: {error.strerror}") from error
    finally:
        if their_output is not None:
            os.close(their_output)
    return ChildProcess(process, os.pidfd_open(process.pid), output)
