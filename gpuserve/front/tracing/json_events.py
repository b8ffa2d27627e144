"""A trace as the events of Triton's trace file: its start, its tensors, its moments, and then its children.

Pure; called by the thread that writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuserve.front.endpoint.http_json import compact
from gpuserve.front.tracing.trace import MOMENTS, Trace, TracedTensor
from gpuserve.front.tracing.values import Level
from gpuserve_worker.tensor import BYTES, ITEMSIZE, numpy_dtype


def events(trace: Trace) -> str:
    """The events, separated by commas; never empty."""
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
    if Level.TIMESTAMPS in trace.level:
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
    """The whole elements in the BYTES layout."""
    position = 0
    while position + 4 <= len(data):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position <= len(data):
            yield data[start:position]
