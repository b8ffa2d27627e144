"""Single keys of a terminal, without Enter, as commands for a server that runs there: r, s, h and q. The
terminal is as it was whenever this program stops, ends or is not in its foreground; where stdin is no
terminal there are no keys.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, Protocol

from gpuserve.cli.views.status_view import status_text
from gpuserve.config.settings import logs
from gpuserve.supervisor.control.operator_protocol import OnOutcome, VerbOutcome

HELP: Final = "Keys: r reload all models, s status, h help, q quit."
#: Whether the terminal is this program's again is looked at so often while it is not.
_BACKGROUND_S: Final = 0.5
#: Of what was typed, so much is read at once: the bytes of one key are together.
_MOST_NBYTES: Final = 256


class ServedHere(Protocol):
    """What keys ask for; from any thread."""

    def request_stop(self) -> None:
        """End the server: finish what is queued first."""

    def request_reload(self, reload_all: bool = False) -> None:
        """Apply what has changed; ``anew``: load all models again."""

    def request_status(self, answer: OnOutcome) -> None:
        """Answer with what ``gpuserve status`` shows."""


def has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def keys_of(server: ServedHere) -> Iterator[None]:
    """Let keys command a server, where stdin is a terminal. To be used in the main thread."""
    if not has_terminal():
        yield
        return
    commands: Mapping[str, Callable[[], object]] = {
        "r": lambda: server.request_reload(reload_all=True),
        "s": lambda: server.request_status(_show_status),
        "h": lambda: logs.write(f"{HELP}\n"),
        "q": server.request_stop,
    }
    with Terminal(sys.stdin.fileno()) as terminal, _stopped_and_continued(terminal):
        thread = threading.Thread(target=_obey, args=(terminal, commands), name="gpuserve-keys", daemon=True)
        thread.start()
        try:
            yield
        finally:
            terminal.end()
            thread.join()


class Terminal:
    """A terminal that gives single keys and shows none while this program has it in the foreground. Owner of
    its mode, which is as it was after the ``with``.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: list[Any] = termios.tcgetattr(fd)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.RLock()
        self._gives_keys = False
        self._is_over = False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()
        os.close(self._wake_fd)

    def read(self) -> str | None:
        """Wait for keys, "" where it is not certain that there are any; None: there are no more."""
        has_terminal = self._take()
        timeout_s = None if has_terminal else _BACKGROUND_S
        ready, _, _ = select.select([self._wake_fd, *([self._fd] if has_terminal else [])], [], [], timeout_s)
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._is_over:
            return None
        if self._fd not in ready or not self._is_ours():
            return ""
        try:
            return os.read(self._fd, _MOST_NBYTES).decode("utf-8", "replace") or None
        except OSError:  # the terminal is gone
            return None

    def look_again(self) -> None:
        """Take the terminal, if it is ours by now."""
        os.eventfd_write(self._wake_fd, 1)

    def end(self) -> None:
        """Let no more keys be waited for."""
        self._is_over = True
        self.look_again()

    def put_back(self) -> None:
        """Give the terminal the mode that it had, until it is read from again."""
        with self._lock:
            if self._gives_keys:
                self._gives_keys = False
                with _undisturbed(), suppress(termios.error):
                    termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _take(self) -> bool:
        """Let it give keys, if it is ours at this moment: whether it does."""
        with self._lock:
            if not self._is_ours() or self._is_over:
                return False
            if not self._gives_keys:
                with suppress(termios.error):
                    tty.setcbreak(self._fd, termios.TCSANOW)
                    self._gives_keys = True
            return self._gives_keys

    def _is_ours(self) -> bool:
        """Whether this program is in the foreground: another's terminal is not to be read or changed."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Who sets the mode of a terminal from the background is stopped by a signal, unless he blocks it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _stopped_and_continued(terminal: Terminal) -> Iterator[None]:
    """Put the terminal back before Ctrl-Z stops this program; it is taken again when it goes on."""

    def stop(number: int, _frame: FrameType | None) -> None:
        terminal.put_back()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, stop)  # it goes on
        terminal.look_again()

    before = signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def _obey(terminal: Terminal, commands: Mapping[str, Callable[[], object]]) -> None:
    while (keys := terminal.read()) is not None:
        for key in keys.lower():
            commands.get(key, lambda: None)()


def _show_status(outcome: VerbOutcome) -> None:
    logs.write(f"{outcome.text}\n" if outcome.code else status_text(outcome.result))
