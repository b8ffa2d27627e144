"""The trace files of mode "triton". Each is one JSON array, and a valid one after every write: the closing
bracket is written over by what comes next. So there is something to read while the server runs, and after
a kill. The events of a trace are its start, its tensors, its moments, and then those of its children.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import numpy as np

from gpuserve.front.observe.tracing.trace import MOMENTS, Trace, TracedTensor
from gpuserve.front.observe.tracing.values import TraceLevel
from gpuserve.front.v2.json_values import compact
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, numpy_dtype

_END: Final = b"\n]\n"
#: Where an empty array ends, without its bracket.
_BEGUN: Final = 1


class _ArrayFile:
    """One file. ``continues``: what an earlier front wrote into it stays."""

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
        """Add traces' events and end the JSON array behind them; OSError: the disk is full, none is there."""
        added = (b"\n" if self._end == _BEGUN else b",\n") + ",\n".join(texts).encode()
        try:
            self._write(added + _END, self._end)
        except OSError:
            self._restore()
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

    def _restore(self) -> None:
        """End the array where it ended before. That takes no room on the disk: the bracket had its own."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end + len(_END))
            self._write(_END, self._end)

    def _end_of_last(self) -> int:
        """Where the array that is there ends, without its bracket. Where there is none, an empty one is."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes > len(_END) and os.pread(self._fd, len(_END), nbytes - len(_END)) == _END:
            return nbytes - len(_END)
        os.ftruncate(self._fd, 0)
        self._write(b"[" + _END, 0)
        return _BEGUN


class TraceFileWriter:
    """Writes traces into ``path``, or ``path.0``, ``path.1``…; after an earlier front if it ``continues``."""

    def __init__(self, path: str, *, continues: bool) -> None:
        self._path = path
        self._continues = continues
        self._whole: _ArrayFile | None = None
        #: The numbered file that is being filled, by scope.
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
            file = self._numbered[scope] = self._begin_numbered()
        file.append([events(trace)])
        if file.traces >= frequency:
            self._numbered.pop(scope).close()

    def _begin_numbered(self) -> _ArrayFile:
        path = self._free_path()
        try:
            file = _ArrayFile(path)
        except OSError:
            with contextlib.suppress(OSError):  # there is no room for the least of arrays
                os.unlink(path)
            raise
        self._next_number += 1
        return file

    def _free_path(self) -> str:
        """The next number; the files of an earlier front of this server are left alone."""
        path = f"{self._path}.{self._next_number}"
        while self._continues and os.path.exists(path):
            self._next_number += 1
            path = f"{self._path}.{self._next_number}"
        return path


# ---- the events of one trace -------------------------------------------------------------------


def events(trace: Trace) -> str:
    """The events of a trace as JSON objects, separated by commas; there is always one."""
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
    """The elements by commas, those of BYTES in quotes; an ellipsis stands for what was not noted."""
    if tensor.datatype == BYTES:
        elements = [f'"{one.decode("utf-8", "replace")}"' for one in _byte_strings(tensor.data)]
    else:
        whole = len(tensor.data) - len(tensor.data) % ITEMSIZE[tensor.datatype]
        array = np.frombuffer(tensor.data[:whole], numpy_dtype(tensor.datatype))
        elements = [str(one) for one in array.astype(float if array.dtype.kind == "V" else array.dtype)]
    return ",".join([*elements, "…"] if tensor.cut else elements)


def _byte_strings(data: bytes) -> Iterator[bytes]:
    """The elements of a BYTES tensor that are whole: each has 4 bytes of its length before it."""
    position = 0
    while position + 4 <= len(data):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position <= len(data):
            yield data[start:position]
