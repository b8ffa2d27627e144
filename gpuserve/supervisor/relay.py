"""The output of child processes, line by line, into the log of the supervisor."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

from gpuserve.logs import relay_line

_CHUNK_NBYTES: Final = 64 * 1024
#: More than a pipe holds, in reads.
_DRAIN_READS: Final = 16
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
        self._take(chunk)
        return bool(chunk)

    def drain(self) -> None:
        """Pass on all that a dead child left. Its own children may hold the pipe open: no waiting."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_DRAIN_READS):  # and a talkative one does not keep us here
                if chunk := os.read(self.fd, _CHUNK_NBYTES):
                    self._take(chunk)
        self._take(b"")

    def _take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._emit(line)
        if not chunk or len(self._rest) > MAX_LINE_NBYTES:
            self._emit(self._rest)
            self._rest = b""

    def _emit(self, line: bytes) -> None:
        if not line:
            return
        # Whoever read our stderr may have gone away; that is no reason to stop serving.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(relay_line(line[:MAX_LINE_NBYTES], self._fields) + "\n")
            sys.stderr.flush()
