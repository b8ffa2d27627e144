"""Lines for a descriptor that may block, as a stderr does that nobody reads: a thread of its own writes them,
and whoever logs never waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

#: What may wait to be written, in bytes of memory. A reader that stops for a moment loses nothing.
MAX_WAITING_NBYTES: Final = 8 << 20
#: What a waiting line takes besides its text.
_LINE_NBYTES: Final = 64
_WRITE_NBYTES: Final = 64 * 1024
#: How long the end of a process waits for the reader.
_FLUSH_TIMEOUT_S: Final = 1.0


class LineWriter:
    """Writes lines in the order in which they came. Those that come while too many wait are dropped, and so
    are the next ones, until half of what waits is written; ``gap`` makes the line that says how many.
    """

    def __init__(self, fd: int, gap: Callable[[int], str], max_nbytes: int = MAX_WAITING_NBYTES) -> None:
        self._fd = fd
        self._gap = gap
        self._max_nbytes = max_nbytes
        self._waiting: deque[bytes] = deque()
        #: Of what waits and what is being written.
        self._nbytes = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Take a line, with its end, or drop it; at once in either case."""
        data = line.encode("utf-8", "backslashreplace")
        with self._changed:
            full = self._nbytes > 0 and self._nbytes + _cost(data) > self._max_nbytes
            if full or self._dropped:
                self._dropped += 1
                return
            self._put(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpuserve-log", daemon=True)
                self._thread.start()

    def flush(self, timeout_s: float = _FLUSH_TIMEOUT_S) -> None:
        """Wait until all is written, but not longer than this: perhaps nobody reads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._nbytes, timeout_s)

    def close(self) -> None:
        """End the thread once all is written; not where nobody reads. A later line begins anew."""
        self.flush()
        with self._changed:
            if self._nbytes or self._thread is None:
                return
            ended, self._ended, self._thread = self._thread, self._thread, None
            self._changed.notify_all()
        ended.join()

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._nbytes += _cost(data)
        self._changed.notify_all()

    def _run(self) -> None:
        # Signals are for the main thread, which would not wake for one that came here.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while lines := self._next():
            with contextlib.suppress(OSError):  # the reader has gone away: no reason to stop serving
                self._write(b"".join(lines))
            self._written(lines)

    def _next(self) -> list[bytes]:
        """Wait for lines, and give as many as go in one write, which may be thousands; none: it ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended is threading.current_thread())
            if self._ended is threading.current_thread():
                return []
            lines = [self._waiting.popleft()]
            nbytes = len(lines[0])
            while self._waiting and (nbytes := nbytes + len(self._waiting[0])) <= _WRITE_NBYTES:
                lines.append(self._waiting.popleft())
            return lines

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # it is somebody's non-blocking pipe
                select.select([], [self._fd], [])

    def _written(self, lines: list[bytes]) -> None:
        with self._changed:
            self._nbytes -= sum(map(_cost, lines))
            if self._dropped and self._nbytes <= self._max_nbytes // 2:
                dropped, self._dropped = self._dropped, 0
                self._put(self._gap(dropped).encode())
            self._changed.notify_all()


def _cost(line: bytes) -> int:
    return len(line) + _LINE_NBYTES
