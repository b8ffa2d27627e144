"""Checks of an inference callable's outputs against the declared ones.

``OutputRules.check`` reads and converts the returned objects. All access to user objects happens there, so
any exception is the callable's failure. ``OutputWriter.write`` then only copies bytes.

The checks depend on the model's ``strict`` and ``exact``:

==========================  =========================  ==============  ==============
property of an output        strict                     strict, exact   not strict
==========================  =========================  ==============  ==============
undeclared name             error                      error           by position if no name is, else dropped
declared, but missing       error, but in streams      left out        left out
other dtype                 cast where numpy says      error           cast, texts to numbers
                            that is safe, else error                   and back too
shape does not fit          error                      error           as it is
other number of rows        error, but in streams      as it is        as it is
than its request
==========================  =========================  ==============  ==============

The ``@batch`` decorator checks that its outputs have the rows of the batch, strict or not. Names in a
returned ``Request`` are those of inputs, so such outputs are matched by position, strict or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol

import numpy as np

from gpuserve_worker.inference.alike_outputs import CopiedResponses, alike_columns, copied_responses
from gpuserve_worker.inference.failure import (
    INTERNAL,
    TEXT_LIMIT,
    DeviceFailure,
    client_text,
    cut,
    failure_of,
)
from gpuserve_worker.inference.inference_request import (
    PARAMETER,
    BatchedOutputs,
    Request,
    Response,
    is_parameter,
)
from gpuserve_worker.inference.ragged import RaggedTensor
from gpuserve_worker.protocol.tensor import (
    BYTES,
    TensorSpec,
    encode_bytes,
    fit_shape,
    fits_shape,
    numpy_dtype,
)
from gpuserve_worker.protocol.wire import Place, WireFailure, WireRequest, WireTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Kinds of numpy types for numeric tensors, and for BYTES tensors.
_NUMERIC_KINDS: Final = "biuf"
_BYTES_KINDS: Final = "OSU"
_TEXTS: Final = (bytes, str, bytearray, memoryview)
_PLAIN_VALUES: Final = (list, tuple, bool, int, float, str, bytes, bytearray, memoryview)

#: ``DLDeviceType``: memory of a CUDA device, and managed memory.
_DLPACK_CUDA: Final = frozenset({2, 13})
#: Characters of an invalid value in an error text.
_SHOWN: Final = 64


class OutputError(Exception):
    """The callable returned outputs that cannot be sent. The text is one sentence for the client."""


class ElementError(OutputError):
    """Some elements of an otherwise valid array cannot be sent."""


class DeviceReader(Protocol):
    """A reader of arrays of any library on the worker's device."""

    #: The arrays that always are on a device, which they need not be asked for.
    array_type: type

    def read(self, value: Any) -> Any:
        """Return an array over the same memory, of the device path's library. May raise anything."""

    def as_dtype(self, array: Any, dtype: np.dtype[Any], value: Any = None) -> Any:
        """Return a contiguous array of this type on the device, the same array if it is one already.
        ``value`` is the object that the array was read from.
        """


class CheckedOutput(NamedTuple):
    """One checked output. ``parts`` are its elements along axis 0: arrays ``[rows, …]`` that only need a
    numeric cast to ``dtype``, or encoded BYTES. ``shape`` is the shape of the whole, with the batch axis, or
    a tuple with the shape of each request's part if these differ; ``nbytes`` is its size as ``dtype``. For
    parts on a device, ``is_kept`` says that the callable may write to them again, and ``source`` must live
    until they are copied.
    """

    name: str
    datatype: str
    shape: tuple[Any, ...]
    nbytes: int
    dtype: np.dtype[Any]
    parts: list[Any]
    is_kept: bool = False
    source: Any = None


class BatchAnswers(NamedTuple):
    """The responses of a batch: the outputs of the whole batch or of each request; the other field is None. A
    request of a decoupled model may have no response. ``parameters`` are those of each response, or empty.
    ``sources`` are the places in clients' regions that outputs may be views of.
    """

    whole: list[CheckedOutput] | None
    each: list[list[CheckedOutput] | WireFailure | None] | None
    parameters: tuple[dict[str, Any], ...] = ()
    sources: tuple[Place, ...] = ()

    def refused(self, failures: Mapping[int, WireFailure | None]) -> BatchAnswers:
        """Return the same responses, with those of refused requests replaced, by position; None means that
        the client was already answered.
        """
        each = [failures.get(position, one) for position, one in enumerate(self.each or ())]
        return self._replace(each=each)


class OutputRules:
    """The rules for a model's outputs. ``tell`` logs the errors of single responses."""

    def __init__(
        self,
        model: str,
        specs: Sequence[TensorSpec],
        *,
        batching: bool,
        strict: bool,
        exact: bool = False,
        decoupled: bool = False,
        owned_outputs: bool = False,
        reader: DeviceReader | None = None,
        tell: Callable[[str], object] = str,
    ) -> None:
        self._model = model
        self._tell = tell
        self._reader = reader
        self._owns_outputs = owned_outputs
        self._specs = tuple(specs)
        self._names = tuple(spec.name for spec in specs)
        self._dtypes = {spec.name: numpy_dtype(spec.datatype) for spec in specs}
        self._batching = batching
        self._strict = strict
        self._casting: Final = "equiv" if exact else "safe"
        #: Whether every output that the request does not exclude must be present, with the request's rows.
        self._complete = strict and not (exact or decoupled)
        self._decoupled = decoupled
        #: The last valid shape of each output, because the next one is usually the same.
        self._fitting: dict[str, tuple[int, ...]] = {}

    def check(self, result: Any, requests: Sequence[WireRequest], *, apart: bool = False) -> BatchAnswers:
        """Return the checked responses for these requests; ``apart`` keeps the requests separate. Raise
        ``OutputError`` if none can be sent.
        """
        if type(result) is BatchedOutputs and (not apart or len(requests) == 1):
            whole = self._whole(result, requests)
            if whole is not None:
                return BatchAnswers(None, [whole]) if apart else BatchAnswers(whole, None)
        elements = self._elements(result, len(requests))
        if self._batching and len(requests) > 1 and not (apart or self._decoupled):
            columns = alike_columns(elements, requests, self._specs, self._dtypes)
            if columns is not None:
                return BatchAnswers([_joined(*one) for one in columns], None)
        each = self._each(elements, requests)
        parameters = self._parameters(elements, each)
        if not (self._decoupled or apart):
            if len(each) == 1:
                whole = each[0] if isinstance(each[0], list) else None
            else:
                whole = _combined(each, requests) if self._batching else None
            if whole is not None:
                return BatchAnswers(whole, None, parameters)
        return BatchAnswers(None, each, parameters)

    def copy(self, responses: Sequence[dict[str, Any]], most_nbytes: int) -> CopiedResponses | None:
        """Return copies of the responses of a step, as ``copied_responses``."""
        return copied_responses(responses, self._specs, most_nbytes)

    def stack(self, copied: CopiedResponses) -> tuple[WireTensor, ...] | None:
        """Return the outputs of all responses stacked, as ``CopiedResponses.stacked``."""
        return copied.stacked(self._dtypes, batching=self._batching)

    def _each(
        self, elements: Sequence[Any], requests: Sequence[WireRequest]
    ) -> list[list[CheckedOutput] | WireFailure | None]:
        """Return the response of each request; an invalid response fails only its own request."""
        each: list[list[CheckedOutput] | WireFailure | None] = []
        wrong: list[OutputError] = []
        for one, request in zip(elements, requests, strict=True):
            try:
                each.append(self._element(one, request))
            except OutputError as error:
                wrong.append(error)
                each.append(failure_of(error))
        if wrong:
            if len(wrong) == len(each):
                raise wrong[0]
            self._tell(
                f"{cut(str(wrong[0]), TEXT_LIMIT)} ({len(wrong)} of {len(each)} requests of the batch)"
            )
        return each

    def _parameters(self, elements: Sequence[Any], answers: Sequence[Any]) -> tuple[dict[str, Any], ...]:
        """Return the parameters of each response, or () if the callable set none."""
        if type(elements) is BatchedOutputs or {*map(type, elements)} == {dict}:
            return ()
        if not any(isinstance(one, Response) for one in elements):
            return ()
        pairs = zip(elements, answers, strict=True)
        return tuple(
            [
                dict(one.parameters) if isinstance(one, Response) and isinstance(answer, list) else {}
                for one, answer in pairs
            ]
        )

    def _whole(self, result: BatchedOutputs, requests: Sequence[WireRequest]) -> list[CheckedOutput] | None:
        """Return the outputs of the whole batch, or None if the requests must be checked separately."""
        if result.rows != tuple([one[0] for one in requests]):
            return None
        named = self._by_declared_name(result.arrays)
        wanted: Collection[str] = self._names
        asked = [one[2] for one in requests if one[2]]
        if asked:
            requested = {name for names in asked for name in names}
            if not requested.issubset(named):
                return None
            if len(asked) == len(requests):
                wanted = requested
        rows = sum(result.rows) if self._batching else None
        found, apart = [], False
        for spec in self._specs:
            if spec.name in wanted and spec.name in named:
                try:
                    found.append(self._output(spec, named[spec.name], rows))
                except ElementError:  # elements of other requests may be valid
                    apart = True
        if apart:
            return None
        if self._complete and len(found) < len(wanted):
            self._refuse_absent(found)
        return found

    def _elements(self, result: Any, count: int) -> Sequence[Any]:
        # A check of an ABC is a call of Python, so most results do not get there.
        if type(result) is not list and (not isinstance(result, Sequence) or isinstance(result, _TEXTS)):
            raise OutputError(
                f"The inference callable of model {self._model!r} must return a list with one mapping of "
                f"output names to arrays for each request, but returned {type(result).__name__}"
            )
        if len(result) != count:
            raise OutputError(
                f"The inference callable of model {self._model!r} returned {len(result)} "
                f"{'response' if len(result) == 1 else 'responses'} for {count} "
                f"{'request' if count == 1 else 'requests'}"
            )
        return result

    def _element(self, element: Any, request: WireRequest) -> list[CheckedOutput] | WireFailure | None:
        data, is_request = element, False
        if type(element) is not dict:
            if isinstance(element, OutputError):
                raise element
            if isinstance(element, Exception):
                return failure_of(element)
            if element is None and self._decoupled:
                return None
            is_request = isinstance(element, Request)
            data = element.data if is_request else element
            if isinstance(data, Response):
                _check_parameters(self._model, data)
            if not isinstance(data, Mapping):
                raise OutputError(
                    f"Each response of the inference callable of model {self._model!r} must be a mapping of "
                    f"output names to arrays, but one is {type(element).__name__}"
                )
        requested = request[2]
        # A response of a stream may have other rows than its request: for example the next few words.
        rows = request[0] if self._batching and self._complete else None
        named = self._by_declared_name(data, is_request)
        for name in requested:
            if name not in named:
                return WireFailure(
                    INTERNAL,
                    f"The inference callable of model {self._model!r} returned no output {name!r}, which "
                    "the request asks for",
                )
        wanted = requested or self._names
        found = [
            self._output(spec, named[spec.name], rows)
            for spec in self._specs
            if spec.name in wanted and spec.name in named
        ]
        if self._complete and not requested and len(found) < len(wanted):
            self._refuse_absent(found)
        return found

    def _by_declared_name(self, data: Mapping[Any, Any], is_request: bool = False) -> Mapping[str, Any]:
        """Return the returned values by declared name. The names in a returned request are input names, which
        mean outputs by their position if no name is declared.
        """
        if self._dtypes.keys() >= data.keys():
            return data
        unknown = [name for name in data if name not in self._dtypes]
        for name in unknown:
            if not isinstance(name, str):
                raise OutputError(f"An output of model {self._model!r} is named {name!r}: names must be str")
        if self._strict and not is_request:
            raise OutputError(f"Output {unknown[0]!r} is not declared; {self._declared()}")
        if len(unknown) < len(data):
            return data
        if is_request and len(data) == len(self._names):
            return dict(zip(self._names, data.values(), strict=True))
        raise OutputError(f"None of the returned outputs {_list(unknown)} is declared; {self._declared()}")

    def _refuse_absent(self, found: Sequence[CheckedOutput]) -> NoReturn:
        there = {one.name for one in found}
        absent = next(name for name in self._names if name not in there)
        raise OutputError(
            f"The inference callable of model {self._model!r} returned no output {absent!r}, which the model "
            "declares"
        )

    def _declared(self) -> str:
        return f"model {self._model!r} declares {_list(self._names)}"

    def _output(self, spec: TensorSpec, value: Any, rows: int | None) -> CheckedOutput:
        """Return one checked output with ``rows`` rows on its first axis; None means any number."""
        if type(value) is RaggedTensor:
            return self._ragged_output(spec, value)
        array: Any = value if type(value) is np.ndarray else self._as_array(spec, value)
        shape = array.shape
        if rows is not None and (not shape or shape[0] != rows):
            raise OutputError(
                f"{self._of(spec)} must have {rows} {'row' if rows == 1 else 'rows'} on its first axis, as "
                f"its input has, but its shape is {shape}"
            )
        if self._strict:
            inner = shape[1:] if self._batching else shape
            if inner != self._fitting.get(spec.name):
                self._check_shape(spec, inner)
        dtype = self._dtypes[spec.name]
        if spec.datatype == BYTES:
            encoded = self._encoded(spec, array)
            return CheckedOutput(spec.name, BYTES, shape, len(encoded), dtype, [encoded])
        if array.dtype != dtype:
            array = self._castable(spec, array, dtype)
        if self._reader is not None and not isinstance(array, np.ndarray):
            return self._device_output(spec, array, value)
        return CheckedOutput(spec.name, spec.datatype, shape, array.size * dtype.itemsize, dtype, [array])

    def _ragged_output(self, spec: TensorSpec, value: RaggedTensor) -> CheckedOutput:
        inner = {shape[1:] for shape in value.shapes}
        if self._strict and not fit_shape(inner, spec.shape):
            for one in inner:
                self._check_shape(spec, one)
        dtype, flat = self._dtypes[spec.name], value.flat
        if flat.dtype != dtype:
            flat = self._castable(spec, flat, dtype)
        nbytes, is_kept = flat.size * dtype.itemsize, not (isinstance(flat, np.ndarray) or self._owns_outputs)
        return CheckedOutput(spec.name, spec.datatype, tuple(value.shapes), nbytes, dtype, [flat], is_kept)

    def _device_output(self, spec: TensorSpec, array: Any, value: Any) -> CheckedOutput:
        assert self._reader is not None, "else no array on a device comes as far as this"
        dtype = self._dtypes[spec.name]
        part = self._reader.as_dtype(array, dtype, value)
        nbytes, is_same = part.size * dtype.itemsize, part is array
        source = None if is_same else array
        is_kept = is_same and not self._owns_outputs
        # The shape of the array, because CuPy adds an axis to a scalar that it copies.
        return CheckedOutput(spec.name, spec.datatype, array.shape, nbytes, dtype, [part], is_kept, source)

    def _as_array(self, spec: TensorSpec, value: Any) -> Any:
        """Return the array in another library's value, a list or a scalar."""
        if self._reader is not None and isinstance(value, self._reader.array_type):
            return self._from_device(spec, value)
        if not isinstance(value, _PLAIN_VALUES) and is_on_device(value):
            return self._from_device(spec, value)
        foreign = hasattr(value, "__array__")
        if not foreign and not isinstance(value, _PLAIN_VALUES):
            hint = ", which was not awaited" if hasattr(value, "__await__") else ""
            raise OutputError(
                f"{self._of(spec)} must be an array, but the callable returned {type(value).__name__}{hint}"
            )
        try:
            if foreign:
                return _from_library(value)
            if spec.datatype == BYTES:
                return np.array(value, dtype=object)
            array, dtype = np.asarray(value), self._dtypes[spec.name]
            # Python numbers have no width: strict mode makes them of the declared type, if that holds them.
            is_number = self._strict and array.dtype.kind in _NUMERIC_KINDS
            return array.astype(dtype) if is_number and _holds(dtype, array) else array
        except OutputError:
            raise
        except Exception as error:  # the conversion runs the value's own code
            raise OutputError(f"{self._of(spec)} cannot be made an array: {client_text(error)}") from error

    def _from_device(self, spec: TensorSpec, value: Any) -> Any:
        if self._reader is None:
            raise OutputError(
                f"{self._of(spec)} is on a GPU, from where its instance cannot copy it: expected an array on "
                "the host, or gpuserve[cuda12] or gpuserve[cuda13] installed and an instance on that GPU"
            )
        try:
            return self._reader.read(value)
        except DeviceFailure:
            raise
        except Exception as error:  # reading runs the value's own code
            raise OutputError(f"{self._of(spec)} cannot be made an array: {client_text(error)}") from error

    def _check_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        if not fits_shape(shape, spec.shape):
            axis = " without the batch axis" if self._batching else ""
            raise OutputError(
                f"{self._of(spec)} must have shape {spec.shape}{axis}, but the callable returned {shape}"
            )
        self._fitting[spec.name] = shape

    def _encoded(self, spec: TensorSpec, array: NDArray[Any]) -> bytes:
        if array.dtype.kind not in _BYTES_KINDS and (self._strict or array.dtype.kind not in _NUMERIC_KINDS):
            raise self._wrong_dtype(spec, array)
        elements = array.ravel().tolist()
        try:
            try:
                return encode_bytes(elements)
            except TypeError:
                if self._strict:
                    raise
                return encode_bytes([one if isinstance(one, _TEXTS) else str(one) for one in elements])
        except (TypeError, ValueError) as error:  # a str may not be encodable as UTF-8
            raise ElementError(f"{self._of(spec)}: {error}") from None

    def _castable(self, spec: TensorSpec, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        if self._strict and not np.can_cast(array.dtype, dtype, self._casting):
            raise self._wrong_dtype(spec, array)
        if array.dtype.kind in _NUMERIC_KINDS or array.dtype.name == "bfloat16":
            return array
        if array.dtype.kind not in ("O" if self._strict else _BYTES_KINDS):
            raise self._wrong_dtype(spec, array)
        try:
            return array.astype(dtype)
        except (TypeError, ValueError, OverflowError):
            raise ElementError(str(self._wrong_dtype(spec, array))) from None

    def _wrong_dtype(self, spec: TensorSpec, array: NDArray[Any]) -> OutputError:
        expected = "bytes or str" if spec.datatype == BYTES else self._dtypes[spec.name].name
        hint = ""
        if self._strict and spec.datatype != BYTES and array.dtype.kind in _NUMERIC_KINDS:
            hint = f", which is not cast without being asked: return it as {expected}, or say strict: false"
        return OutputError(
            f"{self._of(spec)} must be {spec.datatype} ({expected}), but the callable returned "
            f"an array of {array.dtype.name}{hint}"
        )

    def _of(self, spec: TensorSpec) -> str:
        return f"Output {spec.name!r} of model {self._model!r}"


def named_outputs(result: Any, output_names: Sequence[str]) -> Mapping[str, Any]:
    """Return outputs by name; by OUTPUT_1… if the declared names are unknown, which are mapped by position
    later. Raise ``OutputError`` if the result is no outputs, or their number differs from the declaration.
    """
    values: Sequence[Any]
    if isinstance(result, Mapping):
        return result
    if isinstance(result, (list, tuple)):
        values = result
    elif hasattr(result, "__array__"):
        values = [result]
    else:
        raise OutputError(
            f"Unsupported output type {type(result).__name__}: expected a mapping of output names to arrays, "
            "a list of arrays in the order of the declared outputs, or one array"
        )
    names = output_names or [f"OUTPUT_{position}" for position in range(1, len(values) + 1)]
    if len(values) != len(names):
        raise OutputError(
            f"The inference callable returned {len(values)} {'output' if len(values) == 1 else 'outputs'}, "
            f"but the model declares {len(names)}: {', '.join(names)}"
        )
    return dict(zip(names, values, strict=True))


def _check_parameters(model: str, response: Response) -> None:
    for key, value in response.parameters.items():
        if not (isinstance(key, str) and is_parameter(key) and is_parameter(value)):
            given = f"the {type(value).__name__} {repr(value)[:_SHOWN]}"
            raise OutputError(
                f"Response parameter {repr(key)[:_SHOWN]} of model {model!r} is {given}: expected "
                f"{PARAMETER}, by a name that is a str"
            )


def _holds(dtype: np.dtype[Any], array: NDArray[Any]) -> bool:
    """Return whether every number of an array fits the type; integers are compared by value."""
    if not array.size:
        return True
    if dtype.kind not in "iu" or array.dtype.kind not in "iu":
        return np.can_cast(array.dtype, dtype, "same_kind")
    limits = np.iinfo(dtype)
    return bool(limits.min <= array.min() and array.max() <= limits.max)


def _joined(spec: TensorSpec, shape: tuple[Any, ...], parts: list[Any]) -> CheckedOutput:
    dtype = parts[0].dtype
    nbytes = sum([one.nbytes for one in parts])
    return CheckedOutput(spec.name, spec.datatype, shape, nbytes, dtype, parts)


def _combined(
    each: Sequence[list[CheckedOutput] | WireFailure | None], requests: Sequence[WireRequest]
) -> list[CheckedOutput] | None:
    """Return the outputs of all requests as those of one batch, or None unless names and inner shapes are
    equal and each output has the rows of its request.
    """
    columns: list[CheckedOutput] = []
    lists = [one for one in each if isinstance(one, list)]
    if len(lists) != len(each) or any(len(one) != len(lists[0]) for one in lists):
        return None
    for column in zip(*lists, strict=True):
        first = column[0]
        inner = first.shape[1:]
        shapes = [(request[0], *inner) for request in requests]
        if [one.shape for one in column] != shapes or any(one.name != first.name for one in column):
            return None
        rows = sum([shape[0] for shape in shapes])
        parts = [part for one in column for part in one.parts]
        nbytes = sum([one.nbytes for one in column])
        is_kept = any(one.is_kept for one in column)
        source = [one.source for one in column]
        columns.append(
            CheckedOutput(
                first.name, first.datatype, (rows, *inner), nbytes, first.dtype, parts, is_kept, source
            )
        )
    return columns


def is_on_device(value: Any) -> bool:
    """Return whether a value of any library is on a CUDA device."""
    device = getattr(type(value), "__dlpack_device__", None)
    if device is None:
        return hasattr(value, "__cuda_array_interface__")
    try:
        return int(device(value)[0]) in _DLPACK_CUDA
    except Exception:  # the attribute is the value's own code
        return False


def _from_library(value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except TypeError:  # torch's error for bfloat16, which numpy does not have
        if str(getattr(value, "dtype", "")) != "torch.bfloat16":
            raise
        from gpuserve_worker.protocol.tensor import bfloat16_array

        return bfloat16_array(value)


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
