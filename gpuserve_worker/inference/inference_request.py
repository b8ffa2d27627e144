"""The arguments and results of an inference callable: ``Request`` and ``Response``, and batches of them.

The decorators of this project are given a ``Batch`` instead, the arrays of the whole batch that are not split
into requests, so that ``@batch`` neither splits nor concatenates. ``BatchedOutputs`` is the corresponding
result.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from gpuserve_worker.inference.ragged import NOTHING_RAGGED, RaggedNames, RaggedTensor
from gpuserve_worker.protocol import payloads
from gpuserve_worker.protocol.payloads import WireRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays: TypeAlias = dict[str, NDArray[Any]]

_MARK: Final = "_gpuserve_accepts_batch"
_FORM: Final = "_gpuserve_form"
_NO_DETAILS: Final = payloads.RequestDetails()
#: The fields of a ``WireRequest`` after the first three, where a request has only those.
_NO_FIELDS: Final = payloads.WireRequest(0, {}, ())[3:]


def accept_batch(function: Callable[..., Any]) -> None:
    """Mark a function whose last positional argument may be a ``Batch`` instead of a request list."""
    setattr(function, _MARK, function)


def accepts_batch(inference_callable: Any) -> bool:
    """Return whether this callable itself was marked. The mark contains its function, because a wrapper may
    copy the attributes of a marked function, as ``functools.wraps`` does.
    """
    while isinstance(inference_callable, partial):  # bound arguments precede the requests
        inference_callable = inference_callable.func
    function = function_of(inference_callable)
    return function is not None and getattr(function, _MARK, None) is function


def function_of(inference_callable: Any) -> Any:
    """Return the function that a call runs: the callable, a method's function, or ``__call__``."""
    if isinstance(inference_callable, MethodType):
        return inference_callable.__func__
    if isinstance(inference_callable, FunctionType):
        return inference_callable
    return getattr(type(inference_callable), "__call__", None)  # noqa: B004 - the attribute itself is needed


def mark_argument_form(form: str, wrapper: Any) -> None:
    """Mark a wrapper with the form of its function's arguments; wrappers around it keep the mark."""
    setattr(wrapper, _FORM, form)


def argument_form_of(called: Any) -> str | None:
    """Return "batch" or "sample" for a callable with this decorator, of any kind; None for others."""
    while isinstance(called, partial):
        called = called.func
    form: str | None = getattr(called, _FORM, None) or getattr(function_of(called), _FORM, None)
    return form


class Request(MutableMapping[str, "NDArray[Any]"]):
    """One request: its input arrays by name, and its parameters.

    ``data`` maps input names, in declaration order, to arrays; an optional input that was not sent is absent.
    If the model batches, axis 0 of every array is the batch axis. ``parameters`` are the request's own
    parameters; ``requested_output_names`` are the outputs that the client asked for (all outputs if it named
    none). ``cancelled`` becomes True when the client has disconnected or cancelled. ``sequence`` is the
    sequence of the request, if any: its ``id``, and whether the request is its ``start`` or its ``end``.
    ``details`` are its ``id``, ``priority`` and ``timeout_s``, if the model sets ``request_details``.
    """

    __slots__ = ("cancelled", "data", "details", "parameters", "requested_output_names", "sequence")

    #: Callables written for PyTriton may read this attribute; OpenTelemetry's current context replaces it.
    span: ClassVar[None] = None

    def __init__(
        self,
        data: Arrays,
        parameters: Mapping[str, Any] | None = None,
        span: None = None,
        requested_output_names: Sequence[str] | None = None,
    ) -> None:
        self.data = data
        self.parameters: dict[str, Any] = dict(parameters) if parameters else {}
        self.requested_output_names = requested_output_names
        self.cancelled = False
        self.sequence: payloads.Sequence | None = None
        self.details = _NO_DETAILS

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def __setitem__(self, name: str, array: NDArray[Any]) -> None:
        self.data[name] = array

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def with_data(self, data: Arrays) -> Request:
        """Return the same request with other data. Its ``cancelled`` follows that of this request."""
        return _RequestWithData(data, self)

    def traced_span(self, span_name: str) -> AbstractContextManager[Any]:
        """Return a span below OpenTelemetry's current one, for ``with``, as PyTriton's method does. The span
        does nothing unless the program has imported OpenTelemetry and set a tracer provider.
        """
        if "opentelemetry" not in sys.modules:
            return nullcontext()
        from opentelemetry import trace

        return trace.get_tracer("gpuserve").start_as_current_span(span_name)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {getattr(a, 'shape', '?')}" for name, a in self.data.items())
        return f"Request({shapes})"


class _RequestWithData(Request):
    """A request with other data than ``origin``, the request that the worker marks as cancelled."""

    __slots__ = ("origin",)

    def __init__(self, data: Arrays, origin: Request) -> None:
        self.data = data
        self.parameters = origin.parameters
        self.requested_output_names = origin.requested_output_names
        self.sequence = origin.sequence
        self.details = origin.details
        self.origin = origin

    @property
    def cancelled(self) -> bool:  # type: ignore[override]  # replaces the slot
        return self.origin.cancelled


class RequestBatch(list[Request]):
    """The requests of one call, in order. ``output_names`` are the declared outputs in order, for callables
    that return lists by position. ``batching``: axis 0 of the arrays is a batch axis. ``ragged`` are the
    tensors whose shapes may differ between the requests.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        output_names: Sequence[str],
        batching: bool,
        ragged: RaggedNames = NOTHING_RAGGED,
    ) -> None:
        super().__init__(requests)
        self.output_names = tuple(output_names)
        self.batching = batching
        self.ragged = ragged


class Batch:
    """One call's inputs before they are split into requests. ``arrays`` has one array for each input, with
    the rows of all requests, or a ``RaggedTensor``; ``rows`` is the number of rows of each request.
    ``requests`` are ``WireRequest``, or plain tuples of its fields.
    """

    __slots__ = ("arrays", "batching", "output_names", "ragged", "requests", "rows")

    def __init__(
        self,
        arrays: Arrays,
        requests: Sequence[WireRequest],
        output_names: tuple[str, ...],
        batching: bool,
        ragged: RaggedNames = NOTHING_RAGGED,
    ) -> None:
        self.arrays = arrays
        self.requests = requests
        self.rows = tuple([one[0] for one in requests])
        self.output_names = output_names
        self.batching = batching
        self.ragged = ragged

    def with_arrays(self, arrays: Arrays) -> Batch:
        """Return the same requests with other arrays of the same rows."""
        return Batch(arrays, self.requests, self.output_names, self.batching, self.ragged)

    def as_list(self) -> RequestBatch:
        """Return the batch as the list of requests that user code is given; its arrays are views."""
        found: list[Request] = []
        start = 0
        ragged = {}
        if self.ragged.inputs:
            ragged = {name: iter(self.arrays[name]) for name in self.ragged.inputs if name in self.arrays}
        for rows, parameters, requested, *more in self.requests:
            stop = start + rows
            data = self.arrays
            if ragged:
                data = {
                    name: next(ragged[name]) if name in ragged else array[start:stop]
                    for name, array in data.items()
                }
            elif self.batching and len(self.requests) > 1:
                data = {name: array[start:stop] for name, array in data.items()}
            request = Request(data, parameters, None, list(requested or self.output_names))
            _, sequence, _, details = more or _NO_FIELDS
            if sequence is not None:
                request.sequence = payloads.Sequence(*sequence)
            if details is not None:
                request.details = payloads.RequestDetails(*details)
            found.append(request)
            start = stop
        return RequestBatch(found, self.output_names, self.batching, self.ragged)


class BatchedOutputs(Sequence["Arrays"]):
    """Outputs of a whole batch as a sequence with one mapping of arrays for each request. The arrays are
    views. A ragged output is a ``RaggedTensor``.
    """

    __slots__ = ("arrays", "rows")

    def __init__(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[int]) -> None:
        self.arrays = arrays
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Arrays]:
        return map(self._cut, range(len(self.rows)), itertools.accumulate(self.rows, initial=0))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        position = range(len(self.rows))[index]
        return self._cut(position, sum(self.rows[:position]))

    def _cut(self, position: int, start: int) -> Arrays:
        stop = start + self.rows[position]
        return {
            name: array[position] if isinstance(array, RaggedTensor) else array[start:stop]
            for name, array in self.arrays.items()
        }


#: Description of valid parameters, for error texts.
PARAMETER: Final = "a bool, an int of 64 bits, a float or a str"
_INT64: Final = range(-(1 << 63), 1 << 63)


def is_parameter(value: Any) -> bool:
    """Return whether every protocol can carry a value as a parameter."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value)
    if isinstance(value, int):
        return int(value) in _INT64
    return isinstance(value, float)


class StreamStep(list[Any]):
    """One step of a stream: a response or None for each request of the batch. ``last`` are the positions of
    requests whose last response this is.
    """

    def __init__(self, responses: Iterable[Any], last: tuple[int, ...] = ()) -> None:
        super().__init__(responses)
        self.last = last


class Response(Mapping[str, "NDArray[Any]"]):
    """The outputs of one request by name, with parameters for the client.

    A callable may return it in place of the mapping of one request::

        return [gpuserve.Response({"y": y}, parameters={"tokens": 12})]

    ``parameters`` are bool, int (64 bits), float or str, by name.
    """

    __slots__ = ("data", "parameters")

    def __init__(
        self,
        data: Mapping[str, NDArray[Any]],
        parameters: Mapping[str, bool | int | float | str] | None = None,
    ) -> None:
        self.data = dict(data)
        self.parameters = dict(parameters or {})

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {getattr(one, 'shape', '?')}" for name, one in self.data.items())
        return f"Response({shapes}, parameters={self.parameters})"
