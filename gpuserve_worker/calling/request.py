"""What an inference callable is given and may give back: ``Request``, and batches of them. The decorators of
this project are given a ``Batch`` instead, the arrays of the whole batch not yet cut into requests, so that
``@batch`` neither cuts nor concatenates. ``BatchedOutputs`` is its counterpart on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from gpuserve_worker.protocol import payloads
from gpuserve_worker.protocol.payloads import WireRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays: TypeAlias = dict[str, NDArray[Any]]

_MARK: Final = "_gpuserve_accepts_batch"
_NO_DETAILS: Final = payloads.RequestDetails()


def accept_batch(function: Callable[..., Any]) -> None:
    """Mark a function whose last positional argument may be a ``Batch`` in place of a request list."""
    setattr(function, _MARK, function)


def accepts_batch(inference_callable: Any) -> bool:
    """Whether this callable was marked itself. The mark names its function: a wrapper that copied the
    attributes of a marked function, as ``functools.wraps`` does, is not meant by it.
    """
    while isinstance(inference_callable, partial):  # what it was given comes before the requests
        inference_callable = inference_callable.func
    function = function_of(inference_callable)
    return function is not None and getattr(function, _MARK, None) is function


def function_of(inference_callable: Any) -> Any:
    """The function that runs when this is called: its own, a method's, or its class's ``__call__``."""
    if isinstance(inference_callable, MethodType):
        return inference_callable.__func__
    if isinstance(inference_callable, FunctionType):
        return inference_callable
    return getattr(type(inference_callable), "__call__", None)  # noqa: B004 - not to ask whether it is there


class Request(MutableMapping[str, "NDArray[Any]"]):
    """One request: its input arrays by name, and the parameters that came with it.

    ``data`` maps input names, in declaration order, to arrays; an optional input that was not sent
    is absent. Where the model batches, axis 0 of every array is the batch axis. ``parameters`` holds
    the request's own parameters; ``requested_output_names`` what the client asked for (every output
    when it named none). ``cancelled`` becomes True when the client has gone away. ``sequence`` says which
    sequence the request belongs to, if any: its ``id``, and whether it is its ``start`` or its ``end``.
    ``details`` are its ``id``, ``priority`` and ``timeout_s``, where the model sets ``request_details``.
    """

    __slots__ = ("cancelled", "data", "details", "parameters", "requested_output_names", "sequence")

    #: Callables written for PyTriton may look for one; requests are not traced here.
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
        """The same request with other data; whether it is cancelled stays known to it."""
        return _Changed(data, self)

    def traced_span(self, span_name: str) -> AbstractContextManager[None]:
        """Does nothing: the place of a span around a part of the callable's work."""
        return nullcontext()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {getattr(a, 'shape', '?')}" for name, a in self.data.items())
        return f"Request({shapes})"


class _Changed(Request):
    """A request with other data than ``origin``, which is the one that the worker knows."""

    __slots__ = ("origin",)

    def __init__(self, data: Arrays, origin: Request) -> None:
        self.data = data
        self.parameters = origin.parameters
        self.requested_output_names = origin.requested_output_names
        self.sequence = origin.sequence
        self.details = origin.details
        self.origin = origin

    @property
    def cancelled(self) -> bool:  # type: ignore[override]  # in the place of the slot
        return self.origin.cancelled


class RequestBatch(list[Request]):
    """The requests of one call, in order. ``output_names`` are the declared outputs, in order: a callable
    that answers with a list means them by position. ``batching`` says whether axis 0 of the arrays is a batch
    axis.
    """

    def __init__(self, requests: Sequence[Request], output_names: Sequence[str], batching: bool) -> None:
        super().__init__(requests)
        self.output_names = tuple(output_names)
        self.batching = batching


class Batch:
    """One call's inputs before they are cut into requests. ``arrays`` holds one array for each input with the
    rows of every request; ``rows`` is how many each has. ``requests`` are ``WireRequest``, or plain tuples of
    its fields.
    """

    __slots__ = ("arrays", "batching", "output_names", "requests", "rows")

    def __init__(
        self,
        arrays: Arrays,
        requests: Sequence[WireRequest],
        output_names: tuple[str, ...],
        batching: bool,
    ) -> None:
        self.arrays = arrays
        self.requests = requests
        self.rows = tuple([one[0] for one in requests])
        self.output_names = output_names
        self.batching = batching

    def as_list(self) -> RequestBatch:
        """The batch as the list that users are promised; its arrays are views."""
        return RequestBatch(list(self._cut()), self.output_names, self.batching)

    def _cut(self) -> Iterator[Request]:
        start = 0
        for rows, parameters, requested, *more in self.requests:
            stop = start + rows
            data = self.arrays
            if self.batching:
                data = {name: array[start:stop] for name, array in data.items()}
            request = Request(data, parameters, None, list(requested or self.output_names))
            if len(more) > 1:
                _add_told(request, *more)
            yield request
            start = stop


def _add_told(request: Request, placements: Any, sequence: Any, kept: Any = (), details: Any = None) -> None:
    """What only some requests have, out of the fields of a ``WireRequest``."""
    if sequence is not None:
        request.sequence = payloads.Sequence(*sequence)
    if details is not None:
        request.details = payloads.RequestDetails(*details)


class BatchedOutputs(Sequence["Arrays"]):
    """Outputs of a whole batch, seen as one mapping of arrays for each request, which are views."""

    __slots__ = ("arrays", "rows")

    def __init__(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[int]) -> None:
        self.arrays = arrays
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Arrays]:
        start = 0
        for rows in self.rows:
            yield self._cut(start, start + rows)
            start += rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        position = range(len(self.rows))[index]
        start = sum(self.rows[:position])
        return self._cut(start, start + self.rows[position])

    def _cut(self, start: int, stop: int) -> Arrays:
        return {name: array[start:stop] for name, array in self.arrays.items()}
