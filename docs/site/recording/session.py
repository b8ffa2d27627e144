"""A shell in a pseudo-terminal that is typed into, and what it writes, each piece with its time."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

COLUMNS: Final = 80
ROWS: Final = 24
_READ_NBYTES: Final = 65536


class Piece(NamedTuple):
    """What the terminal was sent at once, and when, in seconds from the start."""

    at_s: float
    data: bytes


class Session:
    """One shell, in a folder and with an environment. ``key_s`` is the time between two keys."""

    def __init__(self, folder: Path, environment: Mapping[str, str], key_s: float) -> None:
        self.pieces: list[Piece] = []
        self._key_s = key_s
        #: Where the answer to the last line begins.
        self._line_at = 0
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            _become_shell(folder, environment)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._began_at = time.monotonic()

    def typed(self, line: str) -> None:
        """Type a line and the return key."""
        for key in line:
            os.write(self._fd, key.encode())
            self.watched(self._key_s)
        self._line_at = len(self.pieces)
        os.write(self._fd, b"\r")

    def watched(self, duration_s: float) -> None:
        """Take what is written for so long."""
        until = time.monotonic() + duration_s
        while (left_s := until - time.monotonic()) > 0:
            self._take(left_s)

    def awaited(self, text: str, timeout_s: float = 30.0) -> None:
        """Take what is written until this text is in the answer to the last line. TimeoutError: it is not."""
        until = time.monotonic() + timeout_s
        while text not in (answer := self._answer()):
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{text!r} did not come within {timeout_s} s, but: {answer!r}")
            self._take(left_s)

    def _answer(self) -> str:
        return b"".join(piece.data for piece in self.pieces[self._line_at :]).decode(errors="replace")

    def close(self) -> None:
        """End the shell, and what it has started."""
        os.killpg(self._pid, signal.SIGHUP)
        os.close(self._fd)
        os.waitpid(self._pid, 0)

    def _take(self, timeout_s: float) -> None:
        if select.select([self._fd], [], [], timeout_s)[0]:
            try:
                data = os.read(self._fd, _READ_NBYTES)
            except OSError as error:  # EIO: nobody is at the other end
                raise EOFError("the shell has ended") from error
            self.pieces.append(Piece(time.monotonic() - self._began_at, data))


def _become_shell(folder: Path, environment: Mapping[str, str]) -> NoReturn:
    os.chdir(folder)
    os.execve("/bin/bash", ["bash", "--norc", "--noprofile"], dict(environment))
