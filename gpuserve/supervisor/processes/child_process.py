"""Child processes: their start, the detection of their death, and their end; nothing about what they do.
``gpuserve serve`` imports this module before all others, so that a front starts early: it must stay light.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from gpuserve.core.errors import StartupError
from gpuserve.supervisor.control.reactor import channel_pair
from gpuserve_worker.protocol.stack_signals import request_stacks


class Child(Protocol):
    """A child: a process, or a thread of this process."""

    #: A descriptor that becomes readable when the child ends.
    pidfd: int
    #: The read end of the child's stdout and stderr, or None if the child shares ours.
    output: int | None
    #: The file to which the child writes the stacks of its threads on request, or None.
    stacks: int | None
    #: True if ``kill`` ends the child whatever it does.
    can_be_killed: bool

    @property
    def pid(self) -> int:
        """The id of the process that the child is, or is part of."""

    @property
    def killed(self) -> bool:
        """True if a signal ended the child. Known after ``exit_reason()``."""

    @property
    def exit_status(self) -> int | None:
        """The exit status, known after ``exit_reason()``. None or negative unless the child itself exited."""

    def exit_reason(self) -> str:
        """Reap the child, which has ended, and return why it ended."""

    def kill(self) -> None:
        """Kill the child, if it is alive."""

    def ask_stacks(self, *, forced: bool = False) -> bool:
        """Ask the child to write the stacks of its threads to ``stacks``; ``forced``: also while C code holds
        its GIL, at the risk of crashing the child. Return False if it does not handle this request, or not
        yet.
        """

    def close(self) -> None:
        """Close the descriptors that the supervisor holds of the child."""


class ChildProcess:
    """One child process, in a session of its own, so that Ctrl-C in a terminal reaches only the supervisor,
    and so that the processes that it has started can be killed with it. ``pidfd`` becomes readable within a
    millisecond after its death. ``output`` is the read end of its stdout and stderr, or None if it shares
    ours.
    """

    can_be_killed = True

    def __init__(
        self, process: subprocess.Popen[bytes], pidfd: int, output: int | None, stacks: int | None = None
    ) -> None:
        self._process = process
        self.pidfd = pidfd
        self.output = output
        self.stacks = stacks

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def killed(self) -> bool:
        return (self._process.returncode or 0) < 0

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def ask_stacks(self, *, forced: bool = False) -> bool:
        return request_stacks(self.pid, self.pidfd, forced=forced)

    def exit_reason(self) -> str:
        """Reap the dead process and its process group. Return "exit status 1" or "signal SIGKILL"."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, 0)  # not reaped yet: no other group can have its id
            os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
        return f"signal {-status}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for fd in (self.pidfd, self.output, self.stacks):
            if fd is not None:
                os.close(fd)


def spawn(
    module: str,
    channels: int,
    *,
    arguments: Sequence[str] = (),
    more_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    relay_output: bool,
    shows_stacks: bool = True,
) -> tuple[ChildProcess, list[socket.socket]]:
    """Start ``python -m module ARGUMENT… FD…`` and return the child and our ends of its channels.

    There is one descriptor for each channel, one for the stacks with ``shows_stacks``, and then ``more_fds``,
    which stay the caller's. ``-P`` keeps a stray ``numpy.py`` of the current folder off the import path. With
    ``relay_output`` its stdout and stderr come to ``ChildProcess.output``. Raise StartupError if the process
    could not be started.
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
            stacks = os.memfd_create("gpuserve-stacks") if shows_stacks else None
            if stacks is not None:
                ours.callback(os.close, stacks)
                fds.append(stacks)
            fds += more_fds
            command = [sys.executable, "-P", "-m", module, *arguments, *map(str, fds)]
            process = _start(command, fds, their_output, environment)
            ours.pop_all()
    except OSError as error:
        raise StartupError(f"cannot start a process of {module}: {error.strerror}") from error
    return ChildProcess(*process, output, stacks), [our_end for our_end, _ in pairs]


def _start(
    command: Sequence[str], fds: Sequence[int], output: int | None, environment: Mapping[str, str] | None
) -> tuple[subprocess.Popen[bytes], int]:
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


def front_process(relay_output: bool) -> tuple[Child, socket.socket]:
    """Start a front process, and return it with our end of its control socket."""
    process, (control,) = spawn("gpuserve.front.process", channels=1, relay_output=relay_output)
    return process, control


class EarlyFront:
    """A front that is started before the configuration is read, because both imports take equally long."""

    def __init__(self) -> None:
        self._waiting: tuple[Child, socket.socket] | None = None

    def start(self) -> None:
        """Start the front. If the start fails, ``claim`` tries again and raises the error."""
        with contextlib.suppress(StartupError):
            self._waiting = front_process(relay_output=True)

    def claim(self, relay_output: bool) -> tuple[Child, socket.socket]:
        """Return the waiting front, and a new one from the second call on."""
        waiting, self._waiting = self._waiting, None
        return waiting or front_process(relay_output)

    def close(self) -> None:
        if self._waiting is None:
            return
        (process, control), self._waiting = self._waiting, None
        process.kill()
        process.exit_reason()
        process.close()
        control.close()
