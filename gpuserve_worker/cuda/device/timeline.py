"""Where the copies and calls of a worker lie in time, on the device's own clock: written to a file, for a
profile and not for service. ``load_runtime`` imports this where the environment has
``GPUSERVE_CUDA_TIMELINE``: a file name, to which each worker adds its process id. A line of JSON each, once
it has happened: ``kind`` (h2d, d2h, d2d; or call, the time that the worker measured between two events),
``stream``, ``nbytes``, ``start_ns`` and ``end_ns`` on the device and ``issued_ns`` on the host, all from the
same origin.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from typing import Any, Final, NamedTuple

from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, Copy, CudaError, Runtime

_KINDS: Final = {Copy.HOST_TO_DEVICE: "h2d", Copy.DEVICE_TO_HOST: "d2h", Copy.DEVICE_TO_DEVICE: "d2d"}


class _Copied(NamedTuple):
    """A copy of ``nbytes``, issued at ``issued_ns`` between the events ``start`` and ``end``."""

    kind: str
    stream: int
    nbytes: int
    issued_ns: int
    start: int
    end: int


class TimedRuntime(Runtime):
    """CUDA, with a note of each copy and of each measured call. Any thread may use it."""

    def __init__(self, cupy: Any, driver: Any, file: str) -> None:
        super().__init__(cupy, driver)
        self._file = f"{file}.{os.getpid()}"
        self._lock = threading.Lock()
        self._copies: deque[_Copied] = deque()
        #: Events to measure with: when the host recorded each, and in which stream.
        self._recorded: dict[int, tuple[int, int]] = {}
        self._origin: int | None = None
        self._origin_ns = 0

    def copy(self, to: int, source: int, nbytes: int, kind: Copy, stream: int) -> None:
        with self._lock:
            issued_ns, start = self._now_ns(), self._mark(stream)
            super().copy(to, source, nbytes, kind, stream)
            self._copies.append(_Copied(_KINDS[kind], stream, nbytes, issued_ns, start, self._mark(stream)))
            self._write_copies()

    def create_event(self, *, timing: bool = False) -> int:
        event = super().create_event(timing=timing)
        if timing:
            with self._lock:
                self._recorded[event] = self._now_ns(), -1
        return event

    def record(self, event: int, stream: int) -> None:
        super().record(event, stream)
        if event in self._recorded:
            self._recorded[event] = time.perf_counter_ns() - self._origin_ns, stream

    def elapsed_ns(self, start: int, end: int) -> int:
        """As ``Runtime.elapsed_ns``, by which a call is measured: between events of the default stream."""
        took_ns = super().elapsed_ns(start, end)
        (issued_ns, stream), (_, end_stream) = self._recorded[start], self._recorded[end]
        if stream == end_stream == DEFAULT_STREAM:
            with self._lock:
                self._write("call", stream, 0, issued_ns, start, took_ns)
        return took_ns

    def _now_ns(self) -> int:
        """Nanoseconds since the origin, which is set with the first of them, when nothing is under way."""
        if self._origin is None:
            self._origin = self._mark(DEFAULT_STREAM)
            self.wait(self._origin)
            self._origin_ns = time.perf_counter_ns()
        return time.perf_counter_ns() - self._origin_ns

    def _mark(self, stream: int) -> int:
        event = super().create_event(timing=True)
        super().record(event, stream)
        return event

    def _write_copies(self) -> None:
        try:
            while self._copies and self.has_come(self._copies[0].end):
                one = self._copies.popleft()
                took_ns = super().elapsed_ns(one.start, one.end)
                self._write(one.kind, one.stream, one.nbytes, one.issued_ns, one.start, took_ns)
                self.destroy_event(one.start)
                self.destroy_event(one.end)
        except CudaError:
            self._copies.clear()  # the device is of no use any more, and whoever waits for it hears of it

    def _write(self, kind: str, stream: int, nbytes: int, issued_ns: int, start: int, took_ns: int) -> None:
        assert self._origin is not None, "what is written was issued after the origin"
        start_ns = super().elapsed_ns(self._origin, start)
        line = {
            "kind": kind,
            "stream": stream,
            "nbytes": nbytes,
            "issued_ns": issued_ns,
            "start_ns": start_ns,
            "end_ns": start_ns + took_ns,
        }
        with open(self._file, "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")
