"""The output of child processes, line by line, into the log of the supervisor."""

from __future__ import annotations

import os
import select
import sys
from typing import Final

from gpuserve.logs import relay_line

_CHUNK_NBYTES: Final = 64 * 1024
#: A line longer than this is cut: a child must not make the supervisor hoard memory.
MAX_LINE_NBYTES: Final = 64 * 1024


class OutputRelay:
    """One child's stdout and stderr. ``fields`` name the child in each line."""

    def __init__(self, fd: int, fields: dict[str, str]) -> None:
        self.fd = fd
        self._fields = fields
        self._rest = b""

    def read_some(self) -> bool:
        """Pass on what has come. False once the output has ended."""
        try:
            chunk = os.read(self.fd, _CHUNK_NBYTES)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._emit(line)
        if not chunk or len(self._rest) > MAX_LINE_NBYTES:
            self._emit(self._rest)
            self._rest = b""
        return bool(chunk)

    def drain(self) -> None:
        """Pass on all that a dead child left. Its own children may hold the pipe open: no waiting."""
        while select.select([self.fd], [], [], 0)[0] and self.read_some():
            pass
        self._emit(self._rest)
        self._rest = b""

    def _emit(self, line: bytes) -> None:
        if line:
            sys.stderr.write(relay_line(line[:MAX_LINE_NBYTES], self._fields) + "\n")
            sys.stderr.flush()
