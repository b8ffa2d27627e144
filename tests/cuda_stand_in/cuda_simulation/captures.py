"""Streams whose work is being captured into a graph, and what threads may not call meanwhile. No work is
captured: what matters here is whether a capture comes to its end.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from cuda_simulation import errors
from cuda_simulation.errors import CUDARuntimeError

#: Modes of threads and of captures: who may make unsafe calls while one is under way.
GLOBAL: Final = 0
THREAD_LOCAL: Final = 1
RELAXED: Final = 2
#: Calls that no capture could observe, by the names of the entry points.
UNSAFE: Final = frozenset(
    {
        "deviceSynchronize",
        "eventQuery",
        "eventSynchronize",
        "free",
        "freeHost",
        "hostAlloc",
        "hostRegister",
        "hostUnregister",
        "malloc",
        "memcpy",
        "streamSynchronize",
    }
)


@dataclass
class _Capture:
    thread: int
    mode: int
    is_spoiled: bool = False


class Captures:
    """The captures under way in this process, by the handle of the stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[int, _Capture] = {}

    def begin(self, stream: int, mode: int) -> None:
        with self._lock:
            self._under_way[stream] = _Capture(threading.get_ident(), mode)

    def end(self, stream: int) -> None:
        """Raises CUDARuntimeError: there is none, or a thread has spoiled it."""
        with self._lock:
            capture = self._under_way.pop(stream, None)
        if capture is None:
            raise CUDARuntimeError(errors.ILLEGAL_STATE)
        if capture.is_spoiled:
            raise CUDARuntimeError(errors.STREAM_CAPTURE_INVALIDATED)

    def check(self, name: str, mode: int) -> None:
        """Raises CUDARuntimeError: a thread of this mode may not call that now. It has spoiled a capture."""
        if not self._under_way or name not in UNSAFE or mode == RELAXED:
            return
        with self._lock:
            for capture in self._under_way.values():
                is_own = capture.thread == threading.get_ident() and capture.mode != RELAXED
                if is_own or (mode == GLOBAL and capture.mode == GLOBAL):
                    capture.is_spoiled = True
                    raise CUDARuntimeError(errors.STREAM_CAPTURE_UNSUPPORTED)
