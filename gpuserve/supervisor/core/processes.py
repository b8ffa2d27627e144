"""Child processes: how one is started, how its death is known, how it is ended. Nothing of what it does.
``gpuserve serve`` imports this before all else, so that a front starts early: it must stay light.
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

from gpuserve.control.channel import channel_pair
from gpuserve.errors import StartupError
from gpuserve_worker.protocol.stacks import FORCED_STACKS_SIGNAL, STACKS_SIGNAL


class Child(Protocol):
    """What a keeper needs of the child that it keeps: a process, or a thread of this one."""

    #: A descriptor that becomes readable when the child ends.
    pidfd: int
    #: The read end of the child's stdout and stderr, or None where it has ours.
    output: int | None
    #: The file that the child writes the stacks of its threads to when it is asked; None where it has none.
    stacks: int | None
    #: Whether ``kill`` ends it whatever it does.
    can_be_killed: bool

    @property
    def pid(self) -> int:
        """The process that the child is, or is part of."""

    @property
    def killed(self) -> bool:
        """After ``exit_reason()``: whether a signal ended it."""

    @property
    def exit_status(self) -> int | None:
        """After ``exit_reason()``: its status; None or negative where it did not exit by itself."""

    def exit_reason(self) -> str:
        """Say why the child ended, after its end; this reaps it."""

    def kill(self) -> None:
        """Kill the child, if it still lives."""

    def ask_stacks(self, *, forced: bool = False) -> bool:
        """Ask the child to write the stacks of its threads to ``stacks``.

        Args:
            forced: write them also while C code holds the child's GIL, at the risk of crashing the child.

        Returns:
            False if the child does not handle this request, or not yet.
        """

    def close(self) -> None:
        """Close the descriptors that the supervisor holds of the child."""


class ChildProcess:
    """One child, in a session of its own so that Ctrl-C in a terminal reaches only the supervisor, and so
    that what it has started can be ended with it. ``pidfd`` becomes readable when it dies, within a
    millisecond, whatever descriptors its own children hold. ``output`` is the read end of its stdout and
    stderr, or None where it has ours.
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
        try:
            caught = int(_status_line(self.pid, "SigCgt"), 16) >> (FORCED_STACKS_SIGNAL - 1) & 1
        except (OSError, ValueError):
            return False
        if caught:  # either signal would end a process that is not prepared for both
            self.kill(FORCED_STACKS_SIGNAL if forced else STACKS_SIGNAL)
        return bool(caught)

    def exit_reason(self) -> str:
        """Reap the dead process and say why it ended: "exit status 1" or "signal SIGKILL". What it has
        started ends here, but for what left its process group.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, 0)  # not reaped yet: no other group can have its number
            os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
        return f"signal {-status}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        for fd in (self.pidfd, self.output, self.stacks):
            if fd is not None:
                os.close(fd)


def _status_line(pid: int, name: str) -> str:
    """What the kernel says of a process under that name; ``OSError``, ``ValueError`` if it says nothing."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
    raise ValueError(f"no {name} in /proc/{pid}/status")


def spawn(
    module: str,
    channels: int,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    relay_output: bool,
    shows_stacks: bool = True,
) -> tuple[ChildProcess, list[socket.socket]]:
    """Start ``python -m module ARGUMENT… FD…``, one descriptor for each channel, and one more for its stacks
    where it ``shows_stacks``; the child and our ends of them.
    ``-P`` keeps the current directory off its import path: a stray ``numpy.py`` of the user's must not
    break a worker. With ``relay_output`` its stdout and stderr come to ``ChildProcess.output``. Raises
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
            stacks = os.memfd_create("gpuserve-stacks") if shows_stacks else None
            if stacks is not None:
                ours.callback(os.close, stacks)
                fds.append(stacks)
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


# ---- the front ------------------------------------------------------------------------------


def front_process(relay_output: bool) -> tuple[Child, socket.socket]:
    """Start a front process, or raise ``StartupError``; the process, and our end of its control socket."""
    process, (control,) = spawn("gpuserve.front", channels=1, relay_output=relay_output)
    return process, control


class EarlyFront:
    """A front that is started before the configuration is read: importing what each needs takes as long.
    Until it is taken it waits on its control socket, and ends when that is closed. Its output is relayed.
    """

    def __init__(self) -> None:
        self._waiting: tuple[Child, socket.socket] | None = None

    def start(self) -> None:
        """Start the front. Where that fails, ``take`` tries again, and says why it cannot."""
        with contextlib.suppress(StartupError):
            self._waiting = front_process(relay_output=True)

    def take(self, relay_output: bool) -> tuple[Child, socket.socket]:
        """Give the front that is waiting, and from the second call on another, or raise ``StartupError``."""
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
