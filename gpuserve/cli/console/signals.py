"""What signals do to ``gpuserve serve``: SIGINT and SIGTERM end it, SIGHUP reloads the config."""

from __future__ import annotations

import itertools
import os
import signal
from types import FrameType
from typing import Protocol


class Signalled(Protocol):
    """What signals are passed on to; its methods are safe in a signal handler."""

    def request_stop(self, fast: bool = False, terminated: bool = False) -> None:
        """End the server: finish what is queued first, unless ``fast``; ``terminated``: for a SIGTERM."""

    def request_reload(self) -> None:
        """Read the config file again and apply what has changed."""


def hold_hangup() -> None:
    """Let a SIGHUP wait until there is something to reload. Front and workers inherit that, and ignore it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def obey_signals(server: Signalled) -> None:
    """Let SIGINT and SIGTERM stop the server, a second one at once, and let SIGHUP reload its config. A
    terminal that closes sends SIGHUP too, and ends the server; under nohup it stays ignored.
    """
    signals = itertools.count()

    def stop(number: int, _frame: FrameType | None) -> None:
        server.request_stop(fast=next(signals) > 0, terminated=number == signal.SIGTERM)

    had_terminal = _has_terminal()

    def hang_up(_number: int, _frame: FrameType | None) -> None:
        if had_terminal and not _has_terminal():
            server.request_stop()
        else:
            server.request_reload()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _has_terminal() -> bool:
    """Whether there is a controlling terminal, and it is not closed."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(terminal)
    return True
