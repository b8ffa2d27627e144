"""A batch of sequences on its way to a worker and back: the inputs that tell of them, and empty rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpuserve.front.batching.slots import Batch
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.scatter import Answer, scatter
from gpuserve.front.requests import inference
from gpuserve.front.requests.inference import InferRequest, InferResponse, InputTensor
from gpuserve.model.spec import CORRID, END, START, ModelSpec, SequenceControl
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.tensor import BYTES, element_count, encode_bytes, numpy_dtype


class EmptyRow:
    """Stands in a batch for the request that a sequence does not have in it."""

    rows: Final = 1

    def __init__(self, like: InferRequest) -> None:
        inputs = [InputTensor(one.name, one.datatype, one.shape, _nothing(one)) for one in like.inputs]
        self.request = InferRequest(like.model_name, like.model_version, "", {}, inputs, (), None)
        self.nbytes = sum(len(one.data) for one in inputs)


class SequenceRows:
    """The rows of one model's batches, which are of sequences."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def members(self, batch: Batch) -> Sequence[Any]:
        if not batch.seats:
            return batch.requests
        pending: Mapping[int, Any] = dict(zip(batch.seats, batch.requests, strict=True))
        empty = EmptyRow(pending[batch.seats[0]].request)
        return [pending.get(row, empty) for row in range(max(batch.seats) + 1)]

    def told(self, run: wire.Run, batch: Batch, members: Sequence[Any]) -> wire.Run:
        """The message about a batch, with what it says of sequences besides."""
        rows = [None if isinstance(one, EmptyRow) else one.request.sequence for one in members]
        controls = [self._control(control, rows) for control in self._spec.sequence.controls]
        return run._replace(inputs=(*run.inputs, *controls), dropped=batch.dropped)

    def scatter(
        self,
        link: WorkerLink,
        batch: Batch,
        message: wire.Done | wire.Yield,
        on_gone: Callable[[], None] | None,
    ) -> list[Answer]:
        """As ``scatter``, for the requests of the batch; what came for empty rows is dropped."""
        members = self.members(batch)
        answers = scatter(self._spec, link, members, message, on_gone)
        for member, answer in zip(members, answers, strict=True):
            if isinstance(member, EmptyRow) and isinstance(answer, InferResponse):
                answer.close()
        pairs = zip(members, answers, strict=True)
        return [answer for member, answer in pairs if not isinstance(member, EmptyRow)]

    def _control(
        self, control: SequenceControl, rows: Sequence[inference.Sequence | None]
    ) -> wire.WireTensor:
        shape = (len(rows), 1) if self._spec.max_batch_size else (1,)
        if control.kind != CORRID:
            values = [control.false_true[_is_set(control.kind, row)] for row in rows]
            data = np.array(values, numpy_dtype(control.dtype)).tobytes()
        elif control.dtype == BYTES:
            texts = ["" if row is None else str(row.id) for row in rows]
            data = encode_bytes([text.encode("utf-8", "replace") for text in texts])
        else:
            ids = [0 if row is None else row.id for row in rows]
            data = np.array(ids, numpy_dtype(control.dtype)).tobytes()
        return wire.WireTensor(control.name, control.dtype, shape, data)


def _is_set(kind: str, row: inference.Sequence | None) -> bool:
    if row is None:
        return False
    if kind == START:
        return row.start
    return row.end if kind == END else True  # it is ready


def _nothing(tensor: InputTensor) -> bytes:
    """As many elements as there are in this tensor: zeros, or empty strings."""
    if tensor.datatype == BYTES:
        return bytes(4 * element_count(tensor.shape))
    return bytes(len(tensor.data))
