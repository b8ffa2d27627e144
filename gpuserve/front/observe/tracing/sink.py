"""The way of finished traces off the event loop: a bounded queue, and the thread that empties it. What finds
the queue full is dropped and counted: a slow disk or collector must not slow requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from gpuserve.front.observe.tracing.trace import Trace

logger = logging.getLogger(__name__)

MAX_TRACES: Final = 4096
MAX_NBYTES: Final = 64 << 20
#: Dropped traces are told at most so often.
_TELL_PERIOD_S: Final = 10.0


class TraceWriter(Protocol):
    """Writes traces to a file or a collector. Called by one thread."""

    def write(self, traces: list[Trace]) -> None:
        """Take these, in the order in which they ended; ``OSError`` loses them."""

    def close(self) -> None:
        """Write what is left, and let go of the file or the connection."""


class TraceSink:
    """Takes traces in any thread, and never blocks. The writer is made in the thread that uses it."""

    def __init__(self, make_writer: Callable[[], TraceWriter]) -> None:
        self._make_writer = make_writer
        self._waiting: deque[Trace] = deque()
        self._waiting_nbytes = 0
        self._changed = threading.Condition()
        self._ended = False
        self._dropped = 0
        self._told_at = -_TELL_PERIOD_S
        self._thread = threading.Thread(target=self._run, name="gpuserve-traces", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def put(self, trace: Trace) -> None:
        nbytes = trace.nbytes
        with self._changed:
            full = len(self._waiting) >= MAX_TRACES or self._waiting_nbytes + nbytes > MAX_NBYTES
            if full or self._ended:
                self._dropped += 1
                return
            self._waiting.append(trace)
            self._waiting_nbytes += nbytes
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        writer = self._make_writer()
        while traces := self._take():
            self._write(writer, traces)
        self._tell_dropped(last=True)
        try:
            writer.close()
        except OSError as error:
            logger.error("the trace output cannot be ended: %s", error)

    def _take(self) -> list[Trace]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            traces = list(self._waiting)
            self._waiting.clear()
            self._waiting_nbytes = 0
            return traces

    def _write(self, writer: TraceWriter, traces: list[Trace]) -> None:
        try:
            writer.write(traces)
        except OSError as error:
            self._count_lost(len(traces), str(error))
        except Exception:
            logger.exception("defect while traces are written")
            self._count_lost(len(traces), "")
        self._tell_dropped()

    def _count_lost(self, traces: int, reason: str) -> None:
        with self._changed:
            self._dropped += traces
        if reason and time.monotonic() - self._told_at >= _TELL_PERIOD_S:
            logger.error("traces cannot be written: %s", reason)

    def _tell_dropped(self, last: bool = False) -> None:
        now = time.monotonic()
        if not self._dropped or (now - self._told_at < _TELL_PERIOD_S and not last):
            return
        with self._changed:
            dropped, self._dropped = self._dropped, 0
        self._told_at = now
        logger.warning("%d traces were dropped: the trace output is too slow, or fails", dropped)
