"""Whether a request fits its model, how many rows it has, and which others may share its batch. Pure. Clients
know many of these sentences, so they are worded as Triton words them and then say more. What a shape comes to
is worked out once and remembered for the next request of that shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.v2.limits import (
    MAX_INPUTS,
    MAX_OUTPUTS,
    MAX_PARAMETERS,
    check_count,
    shown,
    shown_dim,
    shown_names,
    shown_shape,
    suggested,
)
from gpuserve.front.v2.strings import WHERE, strings_problem
from gpuserve.front.v2.types import Data, InferRequest, InputTensor, RegionSlice
from gpuserve.front.v2.types import Sequence as RequestSequence
from gpuserve.model.spec import CORRID, ModelSpec, SequenceControl
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, TensorSpec, element_count

#: Shapes remembered for each input, and lists of outputs for each model.
_REMEMBERED: Final = 1024
_LARGEST: Final = (1 << 63) - 1
_BOOL: Final = "BOOL"
#: Datatypes for whose bytes there are rules.
_LOOKED_AT: Final = frozenset({BYTES, _BOOL})
#: What an element of BYTES takes in the array that the callable is given.
_REFERENCE_NBYTES: Final = 8
_BATCH_NOTE: Final = " The first dimension is the batch."


#: The integers that the datatypes of a correlation id hold.
_RANGES: Final = {
    "UINT64": range(1 << 64),
    "INT64": range(-(1 << 63), 1 << 63),
    "UINT32": range(1 << 32),
    "INT32": range(-(1 << 31), 1 << 31),
}


class CheckedRequest(NamedTuple):
    """What the scheduler needs to know of a fitting request; equal ``merge_key``: equal inner shapes."""

    rows: int
    merge_key: Hashable
    nbytes: int


class _Measured(NamedTuple):
    """What the shape of an input comes to; ``nbytes`` is None for BYTES, whose size is in the data."""

    rows: int
    inner: tuple[str, tuple[int, ...]]
    elements: int
    nbytes: int | None
    alone: CheckedRequest


class ModelCheck:
    """The check of one model's requests. Not thread-safe: it remembers what it has accepted."""

    def __init__(self, spec: ModelSpec) -> None:
        self._name = spec.name
        self._batches = spec.max_batch_size > 0
        self._inputs = tuple(_InputCheck(spec, tensor) for tensor in spec.inputs)
        self._by_name = {one.name: one for one in self._inputs}
        self._outputs = tuple(tensor.name for tensor in spec.outputs)
        self._output_names = frozenset(self._outputs)
        self._accepted_outputs: set[tuple[str, ...]] = {()}
        #: What requests of one input came to, of datatypes whose bytes need no look: most requests are like
        #: one before.
        self._known: dict[tuple[str, str, tuple[int, ...]], CheckedRequest] = {}

    def check(self, request: InferRequest) -> CheckedRequest:
        """Check the request, and put its inputs in the order of declaration; raises InvalidArgument."""
        if len(request.parameters) > MAX_PARAMETERS:
            check_count("parameters", len(request.parameters), MAX_PARAMETERS, self._name)
        if request.outputs not in self._accepted_outputs:
            self._check_outputs(request.outputs)
        inputs = request.inputs
        if len(inputs) == 1:
            tensor = inputs[0]
            known = self._known.get((tensor.name, tensor.datatype, tensor.shape))
            if known is not None and known.nbytes == len(tensor.data):
                return known
        checks = self._matched(request)
        try:
            if len(checks) == 1:
                return self._check_alone(checks[0], request.inputs[0])
            return self._check_together(checks, request.inputs)
        except InvalidArgument as error:
            last = _last_fault(checks, request.inputs) or str(error)
            raise InvalidArgument(f"{_prefix(request)}{last}") from None

    def _check_alone(self, check: _InputCheck, tensor: InputTensor) -> CheckedRequest:
        checked = check.check_alone(tensor)
        if tensor.datatype not in _LOOKED_AT and len(self._known) < _REMEMBERED:
            self._known[tensor.name, tensor.datatype, tensor.shape] = checked
        return checked

    def _check_together(self, checks: Sequence[_InputCheck], inputs: Sequence[InputTensor]) -> CheckedRequest:
        nbytes = 0
        rows = 1
        inner = []
        for position, (check, tensor) in enumerate(zip(checks, inputs, strict=True)):
            measured = check.measure(tensor)
            if position and measured.rows != rows:
                raise InvalidArgument(
                    f"input '{check.name}' batch size does not match other inputs for '{self._name}', "
                    f"expected {rows}, got {measured.rows}"
                )
            rows = measured.rows
            inner.append(measured.inner)
            nbytes += len(tensor.data)
        return CheckedRequest(rows, tuple(inner) if self._batches else None, nbytes)

    def _matched(self, request: InferRequest) -> Sequence[_InputCheck]:
        """The checks of the inputs that are there, with the inputs brought into the same order."""
        inputs, checks = request.inputs, self._inputs
        if len(inputs) == len(checks):
            for tensor, check in zip(inputs, checks, strict=True):
                if tensor.name != check.name:
                    break
            else:
                return checks
        by_name = self._inputs_by_name(inputs)
        present = [check for check in checks if check.name in by_name]
        if len(present) < len(checks):
            self._check_missing(request, by_name)
        request.inputs = [by_name[check.name] for check in present]
        return present

    def _inputs_by_name(self, inputs: Sequence[InputTensor]) -> dict[str, InputTensor]:
        check_count("inputs", len(inputs), MAX_INPUTS, self._name)
        by_name: dict[str, InputTensor] = {}
        for tensor in inputs:
            if tensor.name not in self._by_name:
                raise InvalidArgument(
                    f"unexpected inference input '{shown(tensor.name)}' for model '{self._name}', "
                    f"expected {shown_names(self._by_name)}{suggested(tensor.name, self._by_name)}"
                )
            if tensor.name in by_name:
                raise InvalidArgument(
                    f"input '{tensor.name}' already exists in request for model '{self._name}', "
                    "expected each input once"
                )
            by_name[tensor.name] = tensor
        return by_name

    def _check_missing(self, request: InferRequest, given: dict[str, InputTensor]) -> None:
        missing = [one.name for one in self._inputs if not one.optional and one.name not in given]
        if not missing:
            return
        most = len(self._inputs)
        least = sum(not one.optional for one in self._inputs)
        expected = f"{most}" if least == most else f"number of inputs between {least} and {most}"
        noun = " inputs" if least == most else ""
        raise InvalidArgument(
            f"{_prefix(request)}expected {expected}{noun} but got {len(given)} inputs for model "
            f"'{self._name}'. Got input(s) {shown_names(given)}, but missing required input(s) "
            f"{shown_names(missing)}. Please provide all required input(s)."
        )

    def _check_outputs(self, names: tuple[str, ...]) -> None:
        check_count("outputs", len(names), MAX_OUTPUTS, self._name)
        seen = set()
        for name in names:
            if name not in self._output_names:
                raise InvalidArgument(
                    f"unexpected inference output '{shown(name)}' for model '{self._name}', "
                    f"expected {shown_names(self._outputs)}{suggested(name, self._outputs)}"
                )
            if name in seen:
                raise InvalidArgument(
                    f"output '{name}' already exists in request for model '{self._name}', "
                    "expected each output once"
                )
            seen.add(name)
        if len(self._accepted_outputs) < _REMEMBERED:
            self._accepted_outputs.add(names)


def _last_fault(checks: Sequence[_InputCheck], inputs: Sequence[InputTensor]) -> str:
    """Return what is wrong with the last input that is wrong by itself, as Triton does, or "".

    A text: the traceback of an error that the caller holds would refer to the caller's frame and the request.
    """
    for check, tensor in zip(reversed(checks), reversed(inputs), strict=True):
        try:
            check.measure(tensor)
        except InvalidArgument as error:
            return str(error)
    return ""


class SequenceCheck(ModelCheck):
    """The check of the requests of one model of sequences."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._control = spec.sequence.control(CORRID)

    def check(self, request: InferRequest) -> CheckedRequest:
        """As ``ModelCheck.check``; besides, the request must name its sequence and have one row."""
        if request.sequence is None:
            raise InvalidArgument(
                f"inference request to model '{self._name}' must specify a non-zero or "
                "non-empty correlation ID"
            )
        checked = super().check(request)
        if checked.rows != 1:
            raise InvalidArgument(
                f"inference request to model '{self._name}' must specify batch-size 1 due to requirements of "
                f"sequence batcher, got {checked.rows}"
            )
        if self._control is not None:
            self._check_id(self._control, request.sequence)
        return checked

    def _check_id(self, control: SequenceControl, sequence: RequestSequence) -> None:
        is_text, wants_text = isinstance(sequence.id, str), control.dtype == BYTES
        if is_text is not wants_text:
            given = BYTES if is_text else "UINT64"
            raise InvalidArgument(
                f"sequence batching control '{control.name}' data-type is '{given}', "
                f"but model '{self._name}' expects '{control.dtype}'"
            )
        if isinstance(sequence.id, int) and sequence.id not in _RANGES[control.dtype]:
            raise InvalidArgument(
                f"sequence batching control '{control.name}' of model '{self._name}' is {control.dtype}, "
                f"which cannot hold the correlation ID {sequence.id}"
            )


def check_of(spec: ModelSpec) -> ModelCheck:
    return SequenceCheck(spec) if spec.in_sequences else ModelCheck(spec)


def check_claim(spec: ModelSpec, nbytes: int) -> None:
    """Refuse an input of so many bytes before they come, where every one that is declared has fewer."""
    most = 0
    for one in spec.inputs:
        if one.datatype == BYTES or -1 in one.shape:
            return
        most = max(most, element_count(one.shape) * ITEMSIZE[one.datatype] * max(1, spec.max_batch_size))
    if nbytes > most:
        raise InvalidArgument(
            f"an input of {nbytes} bytes for model '{spec.name}' is larger than any that it declares, "
            f"expected at most {most} bytes"
        )


class _InputCheck:
    """The check of one declared input of a model."""

    def __init__(self, spec: ModelSpec, tensor: TensorSpec) -> None:
        self.name = tensor.name
        self.optional = tensor.optional
        self._datatype = tensor.datatype
        self._max_batch_size = spec.max_batch_size
        self._expected = (-1, *tensor.shape) if spec.max_batch_size else tensor.shape
        self._where = f"input '{tensor.name}' for model '{spec.name}'"
        self._model_name = spec.name
        self._measured: dict[tuple[int, ...], _Measured] = {}

    def check_alone(self, tensor: InputTensor) -> CheckedRequest:
        measured = self.measure(tensor)
        if measured.nbytes is None:
            return measured.alone._replace(nbytes=len(tensor.data))
        return measured.alone

    def measure(self, tensor: InputTensor) -> _Measured:
        measured = self._measured.get(tensor.shape)
        if measured is None or tensor.datatype != self._datatype:
            if tensor.datatype != self._datatype:
                raise InvalidArgument(
                    f"inference input '{self.name}' data-type is '{shown(tensor.datatype)}', but model "
                    f"'{self._model_name}' expects '{self._datatype}'"
                )
            measured = self._measure(tensor.shape)
            if len(self._measured) < _REMEMBERED:
                self._measured[tensor.shape] = measured
        if measured.nbytes is None:
            self._check_bytes(tensor, measured.elements)
        elif len(tensor.data) != measured.nbytes:
            raise InvalidArgument(
                f"input byte size mismatch for {self._where}. Expected {measured.nbytes}, "
                f"got {len(tensor.data)}"
            )
        elif self._datatype == _BOOL:
            self._check_bool(tensor.data)
        return measured

    def _measure(self, shape: tuple[int, ...]) -> _Measured:
        batches = self._max_batch_size > 0
        self._check_shape(shape)
        rows, inner = (shape[0], shape[1:]) if batches else (1, shape)
        if batches and not 1 <= rows <= self._max_batch_size:
            raise InvalidArgument(
                f"inference request batch-size must be <= {self._max_batch_size} for '{self._model_name}' "
                f"and at least 1, got {shown_dim(rows)} for input '{self.name}'"
            )
        itemsize = ITEMSIZE[self._datatype]
        self._check_largest(shape, itemsize or _REFERENCE_NBYTES)
        elements = element_count(shape)
        nbytes = None if self._datatype == BYTES else elements * itemsize
        named = (self.name, inner)
        alone = CheckedRequest(rows, (named,) if batches else None, nbytes or 0)
        return _Measured(rows, named, elements, nbytes, alone)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if self._max_batch_size and not shape:
            raise InvalidArgument(
                f"input '{self.name}' has no shape but model requires batch dimension for "
                f"'{self._model_name}', expected {shown_shape(self._expected)}, got []"
            )
        if len(shape) != len(self._expected):
            raise InvalidArgument(self._unexpected_shape(shape))
        if any(dim < 0 for dim in shape):
            raise InvalidArgument(
                f"All input dimensions should be specified for {self._where}, got {shown_shape(shape)}, "
                "expected every dimension to be at least 0"
            )
        if any(dim not in (-1, given) for dim, given in zip(self._expected, shape, strict=True)):
            raise InvalidArgument(self._unexpected_shape(shape))

    def _check_largest(self, shape: tuple[int, ...], itemsize: int) -> None:
        """Refuse what no array can have. A dimension of 0 does not excuse the others in numpy."""
        if element_count([max(dim, 1) for dim in shape]) * itemsize > _LARGEST:
            raise InvalidArgument(
                f"the shape of {self._where} is too large, expected at most {_LARGEST} bytes in all, "
                f"got {shown_shape(shape)} of {self._datatype}"
            )

    def _unexpected_shape(self, shape: tuple[int, ...]) -> str:
        note = _BATCH_NOTE if self._max_batch_size else ""
        return (
            f"unexpected shape for {self._where}. Expected {shown_shape(self._expected)}, got "
            f"{shown_shape(shape)}.{note}"
        )

    def _check_bytes(self, tensor: InputTensor, count: int) -> None:
        data, problem = tensor.data, tensor.problem
        if isinstance(data, RegionSlice):
            self._check_room(len(data), count)
            return
        if problem is None:
            problem = strings_problem(data.view if isinstance(data, Block) else data, count)
        if problem:
            raise InvalidArgument(problem.replace(WHERE, self._where, 1))

    def _check_room(self, nbytes: int, count: int) -> None:
        """What is in a region is for the worker to look at; here, whether it can be that many elements."""
        if nbytes < 4 * count or (nbytes and not count):
            raise InvalidArgument(
                f"expected {count} string elements for inference {self._where}, got {nbytes} bytes of shared "
                "memory, which cannot hold them"
            )

    def _check_bool(self, data: Data) -> None:
        if isinstance(data, RegionSlice):  # its worker looks
            return
        view = data.view if isinstance(data, Block) else data
        largest = int(np.frombuffer(view, dtype=np.uint8).max(initial=0))
        if largest > 1:
            raise InvalidArgument(f"{self._where} is BOOL, expected bytes of 0 or 1, got {largest}")


def _prefix(request: InferRequest) -> str:
    """The id that a client gave, where it gave one."""
    return f"[request id: {shown(request.id)}] " if request.id else ""
