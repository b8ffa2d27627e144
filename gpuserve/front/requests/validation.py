"""Validation of requests against a model's declaration: names, datatypes, shapes, and BYTES elements. Pure.

Clients know many of these error texts, so they begin with Triton's wording and then say more. The result for
a shape is computed once and cached for later requests of the shape. The elements of a large BYTES tensor are
checked in a thread before its request is submitted: elements follow each other by their lengths, so each
takes a step in Python.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.requests.inference import Data, InferRequest, InputTensor, RegionSlice
from gpuserve.front.requests.inference import Sequence as RequestSequence
from gpuserve.front.requests.limits import (
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
from gpuserve.model.spec import CORRID, ModelSpec, SequenceControl
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, TensorSpec, element_count, holds_elements

#: Cached shapes for each input, and cached output lists for each model.
_REMEMBERED: Final = 2048
_LARGEST: Final = (1 << 63) - 1
_BOOL: Final = "BOOL"
#: Datatypes whose bytes have to be checked.
_CHECKED_DATATYPES: Final = frozenset({BYTES, _BOOL})
#: The size of a BYTES element in the array that the callable receives.
_REFERENCE_NBYTES: Final = 8
_BATCH_NOTE: Final = " The first dimension is the batch."


#: The integers that a correlation id of each datatype can hold.
_RANGES: Final = {
    "UINT64": range(1 << 64),
    "INT64": range(-(1 << 63), 1 << 63),
    "UINT32": range(1 << 32),
    "INT32": range(-(1 << 31), 1 << 31),
}


class CheckedRequest(NamedTuple):
    """A valid request for the scheduler. Requests with equal ``merge_key`` may share a batch: their inputs
    have equal inner shapes, or are ragged. If the model has a limit of elements, ``row_elements`` is the size
    of a row in the largest input. ``row_shapes`` are its shapes in the ragged inputs if several sizes of one
    input vary, else ().
    """

    rows: int
    merge_key: Hashable
    nbytes: int
    row_elements: int = 0
    row_shapes: tuple[tuple[int, ...], ...] = ()


class _Measured(NamedTuple):
    """The size of an input by its shape. ``nbytes`` is None for BYTES, whose size depends on the data."""

    rows: int
    inner: tuple[str, tuple[int, ...] | int]
    elements: int
    nbytes: int | None
    alone: CheckedRequest


class ModelCheck:
    """The validation of one model's requests. Not thread-safe: it caches accepted shapes."""

    def __init__(self, spec: ModelSpec) -> None:
        self._name = spec.name
        self._batches = spec.max_batch_size > 0
        self._inputs = tuple(_InputCheck(spec, tensor) for tensor in spec.inputs)
        self._by_name = {one.name: one for one in self._inputs}
        self._outputs = tuple(tensor.name for tensor in spec.outputs)
        self._output_names = frozenset(self._outputs)
        self._accepted_outputs: set[tuple[str, ...]] = {()}
        #: Results for single-input requests of datatypes whose bytes need no check: most requests equal an
        #: earlier one.
        self._cached_results: dict[tuple[str, str, tuple[int, ...]], CheckedRequest] = {}

    def check(self, request: InferRequest) -> CheckedRequest:
        """Check a request, and put its inputs in the order of declaration. Raises InvalidArgument."""
        if len(request.parameters) > MAX_PARAMETERS:
            check_count("parameters", len(request.parameters), MAX_PARAMETERS, self._name)
        if request.outputs not in self._accepted_outputs:
            self._check_outputs(request.outputs)
        inputs = request.inputs
        if len(inputs) == 1:
            tensor = inputs[0]
            cached = self._cached_results.get((tensor.name, tensor.datatype, tensor.shape))
            if cached is not None and cached.nbytes == len(tensor.data):
                return cached
        checks = self._match_inputs(request)
        try:
            if len(checks) == 1:
                tensor = inputs[0]
                checked = checks[0].check_alone(tensor)
                if tensor.datatype not in _CHECKED_DATATYPES and len(self._cached_results) < _REMEMBERED:
                    self._cached_results[tensor.name, tensor.datatype, tensor.shape] = checked
                return checked
            return self._check_together(checks, request.inputs)
        except InvalidArgument as error:
            last = _last_fault(checks, request.inputs) or str(error)
            raise InvalidArgument(f"{_prefix(request)}{last}") from None

    def _check_together(self, checks: Sequence[_InputCheck], inputs: Sequence[InputTensor]) -> CheckedRequest:
        nbytes = row_elements = 0
        rows = 1
        row_shapes: tuple[tuple[int, ...], ...] = ()
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
            row_elements = max(row_elements, measured.alone.row_elements)
            row_shapes += measured.alone.row_shapes
        return CheckedRequest(rows, tuple(inner) if self._batches else None, nbytes, row_elements, row_shapes)

    def _match_inputs(self, request: InferRequest) -> Sequence[_InputCheck]:
        """Return the checks of the inputs that are present, after putting the inputs in the same order."""
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
    """Return the fault of the last invalid input, as Triton does, or "". Inputs are checked one by one.

    Returns a text because the traceback of an error would refer to the caller's frame and the request.
    """
    for check, tensor in zip(reversed(checks), reversed(inputs), strict=True):
        try:
            check.measure(tensor)
        except InvalidArgument as error:
            return str(error)
    return ""


class SequenceCheck(ModelCheck):
    """The validation of requests for a model of sequences."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._control = spec.sequence.control(CORRID)

    def check(self, request: InferRequest) -> CheckedRequest:
        """Check a request as ``ModelCheck.check``; it must also name its sequence and have one row."""
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


def model_check_for(spec: ModelSpec) -> ModelCheck:
    return SequenceCheck(spec) if spec.in_sequences else ModelCheck(spec)


def check_claim(spec: ModelSpec, nbytes: int) -> None:
    """Raise InvalidArgument, before it arrives, for an input larger than every declared input."""
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
    """The validation of one declared input."""

    def __init__(self, spec: ModelSpec, tensor: TensorSpec) -> None:
        self.name = tensor.name
        self.optional = tensor.optional
        self._datatype = tensor.datatype
        self._max_batch_size = spec.max_batch_size
        self._expected = (-1, *tensor.shape) if spec.max_batch_size else tensor.shape
        self._where = f"input '{tensor.name}' for model '{spec.name}'"
        self._model_name = spec.name
        self._boundaries = spec.batching.bucket_boundaries
        #: The axis whose size selects the bucket, or None if the input is not ragged.
        self._ragged_axis = tensor.shape.index(-1) if tensor.ragged else None
        #: Whether the elements of this input count towards ``max_batch_elements``.
        self._is_counted = bool(spec.batching.max_batch_elements) and (
            tensor.ragged or not any(one.ragged for one in spec.inputs)
        )
        #: Whether a padded batch may have more elements than its rows times the longest of them.
        self._has_row_shapes = self._is_counted and any(
            one.ragged and one.shape.count(-1) > 1 for one in spec.inputs
        )
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
        if element_count([max(dim, 1) for dim in shape]) * (itemsize or _REFERENCE_NBYTES) > _LARGEST:
            raise InvalidArgument(
                f"the shape of {self._where} is too large, expected at most {_LARGEST} bytes in all, "
                f"got {shown_shape(shape)} of {self._datatype}"
            )
        elements = element_count(shape)
        nbytes = None if self._datatype == BYTES else elements * itemsize
        named: tuple[str, tuple[int, ...] | int] = (self.name, inner)
        if self._ragged_axis is not None:  # one bucket without boundaries
            named = (self.name, bisect.bisect_left(self._boundaries, inner[self._ragged_axis]))
        row_elements = element_count(inner) if self._is_counted else 0
        row_shapes = (inner,) if self._has_row_shapes else ()
        alone = CheckedRequest(rows, (named,) if batches else None, nbytes or 0, row_elements, row_shapes)
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

    def _unexpected_shape(self, shape: tuple[int, ...]) -> str:
        note = _BATCH_NOTE if self._max_batch_size else ""
        return (
            f"unexpected shape for {self._where}. Expected {shown_shape(self._expected)}, got "
            f"{shown_shape(shape)}.{note}"
        )

    def _check_bytes(self, tensor: InputTensor, count: int) -> None:
        data, problem = tensor.data, tensor.problem
        if isinstance(data, RegionSlice):
            nbytes = len(data)
            if nbytes < 4 * count or (nbytes and not count):
                raise InvalidArgument(
                    f"expected {count} string elements for inference {self._where}, "
                    f"got {nbytes} bytes of shared memory, which cannot hold them"
                )
            return
        if problem is None:
            problem = find_string_problem(data.view if isinstance(data, Block) else data, count)
        if problem:
            raise InvalidArgument(problem.replace(WHERE, self._where, 1))

    def _check_bool(self, data: Data) -> None:
        if isinstance(data, RegionSlice):  # the worker checks the region
            return
        view = data.view if isinstance(data, Block) else data
        largest = int(np.frombuffer(view, dtype=np.uint8).max(initial=0))
        if largest > 1:
            raise InvalidArgument(f"{self._where} is BOOL, expected bytes of 0 or 1, got {largest}")


def _prefix(request: InferRequest) -> str:
    """Return the client's request id as a prefix, or "" without an id."""
    return f"[request id: {shown(request.id)}] " if request.id else ""


# ---- BYTES elements ------------------------------------------------------------------------------

#: BYTES tensors up to this size are checked on the event loop, in at most 3 ms.
SHORT_NBYTES: Final = 64 << 10
#: The placeholder of the tensor's name in a problem text.
WHERE: Final = "{where}"
_MOST_ELEMENTS: Final = 1 << 62
_unpack_length = struct.Struct("<I").unpack_from


def has_long_strings(request: InferRequest) -> bool:
    """Return whether a thread should check the elements of an input."""
    return any(
        one.datatype == BYTES
        and one.problem is None
        and len(one.data) > SHORT_NBYTES
        and type(one.data) is not RegionSlice
        for one in request.inputs
    )


def check_strings(request: InferRequest) -> InferRequest:
    """Set the ``problem`` of each BYTES input, "" for none, and return the request."""
    for one in request.inputs:
        if one.datatype == BYTES and not isinstance(one.data, RegionSlice):
            view = one.data.view if isinstance(one.data, Block) else one.data
            one.problem = find_string_problem(view, min(element_count(one.shape), _MOST_ELEMENTS))
    return request


def find_string_problem(data: memoryview | bytes, count: int) -> str:
    """Return the problem of a BYTES payload of ``count`` elements, with ``WHERE`` in the text, or "" if it is
    valid.

    An element is four bytes of length and as many bytes.
    """
    if holds_elements(data, count):
        return ""
    view = memoryview(data)
    seen, position, end = 0, 0, len(view)
    while position < end:
        left = end - position - 4
        if seen == count:
            return (
                f"unexpected number of string elements {count + 1} for inference {WHERE}, "
                f"expecting {count}, got {end - position} bytes after them"
            )
        if left < 0:
            return (
                f"incomplete string length indicator for inference {WHERE}, expecting 4 bytes "
                f"but only {left + 4} bytes available at element {seen}"
            )
        (length,) = _unpack_length(view, position)
        if length > left:
            return (
                f"incomplete string data for inference {WHERE}, expecting string of length "
                f"{length} but only {left} bytes available at element {seen}"
            )
        position += 4 + length
        seen += 1
    return f"expected {count} string elements for inference {WHERE}, got {seen}"
