"""What a callable answered, as arrays by name for each request: what the worker's own checks let pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gpuserve.api.notebook_html import arrays_html
from gpuserve_worker.calling.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.calling.questions import ModelCallError
from gpuserve_worker.protocol.tensor import BYTES, decode_bytes
from gpuserve_worker.protocol.wire import WireFailure, WireRequest


class Outputs(dict[str, Any]):
    """The outputs of one response, numpy arrays by name, and its ``parameters``."""

    def __init__(self, arrays: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.parameters = dict(parameters)

    def _repr_html_(self) -> str:
        return arrays_html(self, self.parameters)


def answers_of(
    checked: BatchAnswers, requests: Sequence[WireRequest]
) -> Iterator[Outputs | ModelCallError | None]:
    """The answer to each request of a batch: its outputs, what it failed with, or none this time."""
    parameters: Sequence[Mapping[str, Any]] = checked.parameters or [{} for _ in requests]
    if checked.whole is not None:
        arrays = {one.name: _array(one) for one in checked.whole}
        start = 0
        for request, given in zip(requests, parameters, strict=True):
            stop = start + request.rows
            rows = arrays if len(requests) == 1 else {name: one[start:stop] for name, one in arrays.items()}
            yield _asked(rows, request, given)
            start = stop
        return
    for one, request, given in zip(checked.each or (), requests, parameters, strict=True):
        if isinstance(one, WireFailure):
            yield ModelCallError(*one)
        else:
            yield None if one is None else _asked({out.name: _array(out) for out in one}, request, given)


def _asked(arrays: Mapping[str, Any], request: WireRequest, parameters: Mapping[str, Any]) -> Outputs:
    wanted = request.requested_outputs or tuple(arrays)
    return Outputs({name: arrays[name] for name in wanted if name in arrays}, parameters)


def _array(output: CheckedOutput) -> Any:
    if output.datatype == BYTES:
        elements = decode_bytes(b"".join(output.parts), int(np.prod(output.shape)))
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(output.shape)
    parts = [np.asarray(part, dtype=output.dtype) for part in output.parts]
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return joined.reshape(output.shape).copy()
