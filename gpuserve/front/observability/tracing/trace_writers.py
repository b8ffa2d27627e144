"""Output of finished traces off the event loop: a bounded queue with a writer thread, and the trace files of
mode "triton".

Traces that find the queue full are dropped and counted: a slow disk or collector must not slow requests. Each
trace file is one JSON array, valid after every write, since the next write overwrites the closing bracket. So
the file can be read while the server runs, and after a kill.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, Protocol

import numpy as np

from gpuserve.front.observability.tracing.request_trace import MOMENTS, Trace, TracedTensor
from gpuserve.front.observability.tracing.trace_settings import TraceLevel
from gpuserve.front.requests.json_values import compact
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, numpy_dtype

logger = logging.getLogger(__name__)

MAX_TRACES: Final = 4096
MAX_NBYTES: Final = 64 << 20
#: The shortest interval between log lines about dropped traces.
_REPORT_PERIOD_S: Final = 10.0


class TraceWriter(Protocol):
    """A writer of traces to a file or a collector, used by one thread."""

    def write(self, traces: list[Trace]) -> None:
        """Write traces in the order in which they ended. ``OSError`` loses them."""

    def close(self) -> None:
        """Write buffered traces, and close the file or the connection."""


class TraceSink:
    """A bounded queue of traces and its writer thread, which creates the writer. ``put`` never blocks."""

    def __init__(self, make_writer: Callable[[], TraceWriter]) -> None:
        self._make_writer = make_writer
        self._queue: deque[Trace] = deque()
        self._queued_nbytes = 0
        self._changed = threading.Condition()
        self._ended = False
        self._dropped = 0
        self._reported_at = -_REPORT_PERIOD_S
        self._thread = threading.Thread(target=self._run, name="gpuserve-traces", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def put(self, trace: Trace) -> None:
        nbytes = trace.nbytes
        with self._changed:
            full = len(self._queue) >= MAX_TRACES or self._queued_nbytes + nbytes > MAX_NBYTES
            if full or self._ended:
                self._dropped += 1
                return
            self._queue.append(trace)
            self._queued_nbytes += nbytes
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        writer = self._make_writer()
        while traces := self._dequeue():
            self._write(writer, traces)
        self._report_dropped(last=True)
        try:
            writer.close()
        except OSError as error:
            logger.error("failed to close trace output: %s", error)

    def _dequeue(self) -> list[Trace]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ended)
            traces = list(self._queue)
            self._queue.clear()
            self._queued_nbytes = 0
            return traces

    def _write(self, writer: TraceWriter, traces: list[Trace]) -> None:
        try:
            writer.write(traces)
        except OSError as error:
            self._count_lost(len(traces), str(error))
        except Exception:
            logger.exception("failed to write traces: unexpected error")
            self._count_lost(len(traces), "")
        self._report_dropped()

    def _count_lost(self, traces: int, reason: str) -> None:
        with self._changed:
            self._dropped += traces
        if reason and time.monotonic() - self._reported_at >= _REPORT_PERIOD_S:
            logger.error("failed to write traces: %s", reason)

    def _report_dropped(self, last: bool = False) -> None:
        now = time.monotonic()
        if not self._dropped or (now - self._reported_at < _REPORT_PERIOD_S and not last):
            return
        with self._changed:
            dropped, self._dropped = self._dropped, 0
        self._reported_at = now
        logger.warning("dropped %d traces: the trace output is too slow, or fails", dropped)


# ---- trace files ---------------------------------------------------------------------------------

_END: Final = b"\n]\n"
#: The end of an empty array, without its bracket.
_EMPTY_END: Final = 1


class _ArrayFile:
    """One file. ``continues`` keeps what an earlier front wrote into it."""

    def __init__(self, path: str, *, continues: bool = False) -> None:
        self.traces = 0
        kept = 0 if continues else os.O_TRUNC
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | kept, 0o640)
        try:
            self._end = self._end_of_last()
        except OSError:
            os.close(self._fd)
            raise

    def append(self, texts: Sequence[str]) -> None:
        """Append the events of traces. Raise OSError on failure, with the array unchanged."""
        added = (b"\n" if self._end == _EMPTY_END else b",\n") + ",\n".join(texts).encode()
        try:
            self._write(added + _END, self._end)
        except OSError:
            # Restore the end of the array. That takes no disk space: the bracket was there before.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end + len(_END))
                self._write(_END, self._end)
            raise
        self._end += len(added)
        self.traces += len(texts)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, data: bytes, position: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, position)
            view, position = view[written:], position + written

    def _end_of_last(self) -> int:
        """Return the end of the array without its bracket. Create an empty array if there is none."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes > len(_END) and os.pread(self._fd, len(_END), nbytes - len(_END)) == _END:
            return nbytes - len(_END)
        os.ftruncate(self._fd, 0)
        self._write(b"[" + _END, 0)
        return _EMPTY_END


class TraceFileWriter:
    """A writer of traces into ``path``, or ``path.0``, ``path.1`` …, after those it ``continues``."""

    def __init__(self, path: str, *, continues: bool) -> None:
        self._path = path
        self._continues = continues
        self._whole: _ArrayFile | None = None
        #: The numbered file being filled, by scope.
        self._numbered: dict[str, _ArrayFile] = {}
        self._next_number = 0

    def write(self, traces: list[Trace]) -> None:
        for (scope, frequency), group in groupby(traces, attrgetter("scope", "log_frequency")):
            if frequency:
                for trace in group:
                    self._write_numbered(scope, frequency, trace)
            else:
                if self._whole is None:
                    self._whole = _ArrayFile(self._path, continues=self._continues)
                self._whole.append(list(map(events, group)))

    def close(self) -> None:
        for file in (self._whole, *self._numbered.values()):
            if file is not None:
                file.close()

    def _write_numbered(self, scope: str, frequency: int, trace: Trace) -> None:
        file = self._numbered.get(scope)
        if file is None:
            file = self._numbered[scope] = self._open_numbered()
        file.append([events(trace)])
        if file.traces >= frequency:
            self._numbered.pop(scope).close()

    def _open_numbered(self) -> _ArrayFile:
        path = self._free_path()
        try:
            file = _ArrayFile(path)
        except OSError:
            with contextlib.suppress(OSError):  # no space for even an empty array
                os.unlink(path)
            raise
        self._next_number += 1
        return file

    def _free_path(self) -> str:
        """Return the next numbered path. Files of an earlier front of this server are left alone."""
        path = f"{self._path}.{self._next_number}"
        while self._continues and os.path.exists(path):
            self._next_number += 1
            path = f"{self._path}.{self._next_number}"
        return path


# ---- the events of one trace -------------------------------------------------------------------


def events(trace: Trace) -> str:
    """Return the events of a trace as JSON objects, separated by commas; there is at least one."""
    return ",\n".join(map(compact, _events(trace)))


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    start: dict[str, Any] = {"id": trace.id, "model_name": trace.model, "model_version": trace.version}
    if trace.request_id:
        start["request_id"] = trace.request_id
    if trace.parent_id:
        start["parent_id"] = trace.parent_id
    yield start
    for tensor in trace.tensors:
        yield {"id": trace.id, "activity": tensor.activity, "tensor": _tensor(tensor)}
    if TraceLevel.TIMESTAMPS in trace.level:
        moments = [{"name": one, "ns": trace.moments[one]} for one in MOMENTS if one in trace.moments]
        yield {"id": trace.id, "timestamps": moments}
    for child in trace.children:
        yield from _events(child)


def _tensor(tensor: TracedTensor) -> dict[str, str]:
    shape = ",".join(map(str, tensor.shape))
    return {"name": tensor.name, "data": _data(tensor), "shape": shape, "dtype": tensor.datatype}


def _data(tensor: TracedTensor) -> str:
    if tensor.datatype == BYTES:
        elements = [f'"{one.decode("utf-8", "replace")}"' for one in _byte_strings(tensor.data)]
    else:
        whole = len(tensor.data) - len(tensor.data) % ITEMSIZE[tensor.datatype]
        array = np.frombuffer(tensor.data[:whole], numpy_dtype(tensor.datatype))
        elements = [str(one) for one in array.astype(float if array.dtype.kind == "V" else array.dtype)]
    return ",".join([*elements, "…"] if tensor.cut else elements)


def _byte_strings(data: bytes) -> Iterator[bytes]:
    position = 0
    while position + 4 <= len(data):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position <= len(data):
            yield data[start:position]
