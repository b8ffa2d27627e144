"""Single keys of a terminal as commands for a server, and the mode of the terminal, which is restored."""

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
from typing import TYPE_CHECKING, Any, Final

from gpuserve.cli.live.status_view import status_text
from gpuserve.config.settings import logs

if TYPE_CHECKING:
    from gpuserve.supervisor.control.operator_protocol import VerbOutcome
    from gpuserve.supervisor.supervisor import Supervisor

HELP: Final = "Keys: r reload all models, s status, h help, q quit."
#: Interval of the check for the foreground while the program is in the background.
_BACKGROUND_POLL_S: Final = 0.5
#: Large enough that the bytes of one key are read together.
_READ_NBYTES: Final = 256


def has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def control_by_keys(server: Supervisor) -> Iterator[None]:
    """Let keys control a server if stdin is a terminal. Must be called in the main thread."""
    if not has_terminal():
        yield
        return
    commands: Mapping[str, Callable[[], object]] = {
        "r": lambda: server.request_reload(reload_all=True),
        "s": lambda: server.request_status(show_status),
        "h": lambda: logs.write_lines(f"{HELP}\n"),
        "q": server.request_stop,
    }

    def show_status(outcome: VerbOutcome) -> None:
        logs.write_lines(f"{outcome.text}\n" if outcome.code else status_text(outcome.result))

    def run_commands() -> None:
        while (keys := terminal.read()) is not None:
            for key in keys.lower():
                commands.get(key, lambda: None)()

    with Terminal(sys.stdin.fileno()) as terminal, _restored_on_stop(terminal):
        thread = threading.Thread(target=run_commands, name="gpuserve-keys", daemon=True)
        thread.start()
        try:
            yield
        finally:
            terminal.end()
            thread.join()


class Terminal:
    """A terminal in the foreground that delivers single keys without echo, and restores its mode at exit."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: list[Any] = termios.tcgetattr(fd)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.RLock()
        self._in_key_mode = False
        self._has_ended = False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        os.close(self._wake_fd)

    def read(self) -> str | None:
        """Wait for keys and return them; return "" if there may be none, and None after the last."""
        has_terminal = self._enter_key_mode()
        timeout_s = None if has_terminal else _BACKGROUND_POLL_S
        ready, _, _ = select.select([self._wake_fd, *([self._fd] if has_terminal else [])], [], [], timeout_s)
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._has_ended:
            return None
        if self._fd not in ready or not self._is_in_foreground():
            return ""
        try:
            return os.read(self._fd, _READ_NBYTES).decode("utf-8", "replace") or None
        except OSError:  # the terminal has been closed
            return None

    def wake(self) -> None:
        """Make ``read`` check again whether this program is in the foreground."""
        os.eventfd_write(self._wake_fd, 1)

    def end(self) -> None:
        """Make ``read`` return None from now on."""
        self._has_ended = True
        self.wake()

    def restore(self) -> None:
        """Restore the mode that the terminal had, until the next ``read``."""
        with self._lock:
            if self._in_key_mode:
                self._in_key_mode = False
                with _sigttou_blocked(), suppress(termios.error):
                    termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _enter_key_mode(self) -> bool:
        """Deliver single keys if this program is in the foreground; return whether the terminal does."""
        with self._lock:
            if not self._is_in_foreground() or self._has_ended:
                return False
            if not self._in_key_mode:
                with suppress(termios.error):
                    tty.setcbreak(self._fd, termios.TCSANOW)
                    self._in_key_mode = True
            return self._in_key_mode

    def _is_in_foreground(self) -> bool:
        """Return whether this program may read and change the terminal."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False


@contextmanager
def _sigttou_blocked() -> Iterator[None]:
    """Block SIGTTOU, which would stop a background program that sets the mode of a terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _restored_on_stop(terminal: Terminal) -> Iterator[None]:
    """Restore the terminal before Ctrl-Z stops this program; the next ``read`` sets its mode again."""

    def stop(number: int, _frame: FrameType | None) -> None:
        terminal.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, stop)  # SIGCONT has arrived
        terminal.wake()

    before = signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
