"""The output of child processes, line by line, into the log of the supervisor."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

from gpuserve.logs import relay_line
from gpuserve.supervisor.reactor import Reactor

_CHUNK_NBYTES: Final = 64 * 1024
#: More than a pipe holds, in reads.
_DRAIN_READS: Final = 16
#: A line longer than this is cut: a child must not make the supervisor hoard memory.
MAX_LINE_NBYTES: Final = 64 * 1024


class OutputRelay:
    """One child's stdout and stderr, from ``open()`` to ``close()``; ``fields`` name the child in each line.

    Without a descriptor the child has our own, and there is nothing to do.
    """

    def __init__(self, fd: int | None, fields: dict[str, str], reactor: Reactor) -> None:
        self._fd = fd
        self._fields = fields
        self._reactor = reactor
        self._rest = b""

    def open(self) -> None:
        """Pass on whatever comes from now on."""
        if self._fd is not None:
            self._reactor.watch(self._fd, self._on_readable)

    def close(self) -> None:
        """Pass on all that a dead child left. Its own children may hold the pipe open: no waiting."""
        if self._fd is None:
            return
        self._reactor.unwatch(self._fd)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_DRAIN_READS):  # and a talkative one does not keep us here
                if chunk := os.read(self._fd, _CHUNK_NBYTES):
                    self._take(chunk)
        self._take(b"")

    def _on_readable(self) -> None:
        assert self._fd is not None
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._fd, _CHUNK_NBYTES)
            self._take(chunk)
            if not chunk:
                self._reactor.unwatch(self._fd)

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
