"""Whether a request fits a model of sequences: what ``validation.py`` asks of every request, and then what is
asked of its sequence. Pure. Whether the sequence is there is known to the scheduler alone.
"""

from __future__ import annotations

from typing import Final

from gpuserve.errors import InvalidArgument
from gpuserve.front.endpoint.limits import shown
from gpuserve.front.endpoint.v2 import InferRequest, Sequence
from gpuserve.front.endpoint.validation import CheckedRequest, ModelCheck
from gpuserve.sequence_spec import CORRID, ControlSpec
from gpuserve.spec import ModelSpec
from gpuserve_worker.tensor import BYTES

#: The integers that the datatypes of a correlation id hold.
_RANGES: Final = {
    "UINT64": range(1 << 64),
    "INT64": range(-(1 << 63), 1 << 63),
    "UINT32": range(1 << 32),
    "INT32": range(-(1 << 31), 1 << 31),
}


class SequenceCheck(ModelCheck):
    """The check of the requests of one model of sequences."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._model = spec.name
        self._control = spec.sequence.control(CORRID)

    def check(self, request: InferRequest) -> CheckedRequest:
        """As ``ModelCheck.check``; besides, the request must name its sequence and have one row.

        Raises:
            InvalidArgument: it does not fit.
        """
        if request.sequence is None:
            raise InvalidArgument(
                f"{_prefix(request)}inference request to model '{self._model}' must specify a non-zero or "
                "non-empty correlation ID"
            )
        checked = super().check(request)
        if checked.rows != 1:
            raise InvalidArgument(
                f"{_prefix(request)}inference request to model '{self._model}' must specify batch-size 1 due "
                f"to requirements of sequence batcher, got {checked.rows}"
            )
        if self._control is not None:
            self._check_id(self._control, request.sequence)
        return checked

    def _check_id(self, control: ControlSpec, sequence: Sequence) -> None:
        is_text, wants_text = isinstance(sequence.id, str), control.datatype == BYTES
        if is_text is not wants_text:
            given = BYTES if is_text else "UINT64"
            raise InvalidArgument(
                f"sequence batching control '{control.name}' data-type is '{given}', "
                f"but model '{self._model}' expects '{control.datatype}'"
            )
        if isinstance(sequence.id, int) and sequence.id not in _RANGES[control.datatype]:
            raise InvalidArgument(
                f"sequence batching control '{control.name}' of model '{self._model}' is {control.datatype}, "
                f"which cannot hold the correlation ID {sequence.id}"
            )


def _prefix(request: InferRequest) -> str:
    return f"[request id: {shown(request.id) or '<id_unknown>'}] "
