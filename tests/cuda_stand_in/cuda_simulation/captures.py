"""Streams whose work is being captured into a graph, what threads may not call meanwhile, and the graphs. A
graph has the work of one stream: others do not join a capture.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field, replace
from typing import Final

from cuda_simulation import errors
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.scheduler import Operation

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
    operations: list[Operation] = field(default_factory=list)


class Captures:
    """The captures under way in this process, by the handle of the stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[int, _Capture] = {}
        self._numbers = itertools.count(1)
        self._graphs: dict[int, list[Operation]] = {}

    def begin(self, stream: int, mode: int) -> None:
        with self._lock:
            self._under_way[stream] = _Capture(threading.get_ident(), mode)

    def holds(self, stream: int, operation: Operation) -> bool:
        """Put what is queued on a stream into its capture, if there is one; whether it is there."""
        capture = self._under_way.get(stream)
        if capture is not None:
            capture.operations.append(operation)
        return capture is not None

    def operations(self, graph: int) -> list[Operation]:
        """New ones, in the order of the capture. Raises CUDARuntimeError: there is no such graph."""
        if graph not in self._graphs:
            raise CUDARuntimeError(errors.INVALID_VALUE)
        return [replace(one, after=[]) for one in self._graphs[graph]]

    def destroy(self, graph: int) -> None:
        self._graphs.pop(graph, None)

    def end(self, stream: int) -> int:
        """The graph. Raises CUDARuntimeError: there is no capture, or a thread has spoiled it."""
        with self._lock:
            capture = self._under_way.pop(stream, None)
        if capture is None:
            raise CUDARuntimeError(errors.ILLEGAL_STATE)
        if capture.is_spoiled:
            raise CUDARuntimeError(errors.STREAM_CAPTURE_INVALIDATED)
        graph = next(self._numbers)
        self._graphs[graph] = capture.operations
        return graph

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
