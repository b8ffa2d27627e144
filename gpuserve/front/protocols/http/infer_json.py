"""The JSON part of an inference request to an ``InferHeader``, long arrays lifted out before. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.core.errors import InvalidArgument, RequestError
from gpuserve.front.requests import json_values as values
from gpuserve.front.requests import parameters as known
from gpuserve.front.requests.inference import NOTHING, InferRequest, InputTensor, RegionSlice, Sequence
from gpuserve.front.requests.json_arrays import DATA_KEY, SHORT_NBYTES, LiftedText, lift
from gpuserve.front.requests.json_values import MAX_INT64, member, typed, unsigned
from gpuserve.front.requests.limits import MAX_TEXTS_NBYTES, check_texts, shown
from gpuserve.front.requests.parameters import RequestedOutputs
from gpuserve_worker.protocol.tensor import ITEMSIZE

#: Clients send the same headers again and again, one for each length of their tensors. Headers up to this
#: length are cached, the last ``_REMEMBERED`` of them.
REMEMBERED_NBYTES: Final = 1024
_REMEMBERED: Final = 2048

_OWN_PARAMETERS: Final = known.SEQUENCE_KEYS | {"priority", "timeout", "binary_data_output"}
_KINDS: Final = known.Kinds("a string", "an unsigned integer")
_EXACT: Final = (values.TOO_FEW, values.TOO_MANY)
#: The lifted arrays of one request, in the order of the inputs.
Arrays: TypeAlias = Iterator[bytes | memoryview]
NO_ARRAYS: Final[Arrays] = iter(())
_DATA_FIELDS: Final = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'"


class OutputForm(NamedTuple):
    """The outputs to send as binary data: those named here, or all."""

    names: frozenset[str] = frozenset()
    everything: bool = False


class HeaderInput(NamedTuple):
    """One input. Its data is one of: ``nbytes`` of binary data after the JSON, ``inline`` bytes from the
    JSON, the array ``lifted`` with this number (of ``elements``), or a shared-memory region (``place``).
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int | None
    inline: bytes | memoryview = b""
    place: RegionSlice | None = None
    lifted: int | None = None
    elements: int = 0

    def own_data(self, arrays: Arrays) -> bytes | memoryview | RegionSlice:
        """Return the data of an input without binary data. A lifted input gets the next array."""
        if self.lifted is not None:
            return next(arrays)
        return self.inline if self.place is None else self.place.unresolved_copy()


class InferHeader(NamedTuple):
    """The content of a request's JSON. Requests with equal JSON share one, which nobody changes."""

    inputs: tuple[HeaderInput, ...]
    request_id: str
    parameters: dict[str, Any]
    timeout_s: float | None
    priority: int
    outputs: RequestedOutputs
    form: OutputForm
    in_regions: bool = False
    sequence: Sequence | None = None
    #: Whether binary data comes after the JSON.
    binary: bool = False

    def request(self, model_name: str, model_version: str, inputs: list[InputTensor]) -> InferRequest:
        """Return the request for a model with the given input data."""
        _, request_id, parameters, timeout_s, priority, outputs, _, in_regions, sequence, _ = self
        names, placements, class_counts = outputs
        request = InferRequest(
            model_name,
            model_version,
            request_id,
            dict(parameters),
            inputs,
            names,
            timeout_s,
            priority,
            False,
            NOTHING,
            class_counts,
            sequence,
        )
        if placements or in_regions:  # copied for each request: the numbers of regions are written into them
            request.placements = {name: one.unresolved_copy() for name, one in placements.items()}
            request.regions = known.regions_of(inputs, request.placements)
        return request


def read_header(text: bytes | bytearray) -> InferHeader:
    """Return the content of a request's JSON. Raise InvalidArgument if it violates the protocol."""
    return _header(values.loads(text))


def _header(found: Any) -> InferHeader:
    document = typed(found, dict, "the request")
    parameters = typed(document.get("parameters", {}), dict, "'parameters'")
    entries = member(document, "inputs", list)
    outputs = typed(document.get("outputs", []), list, "'outputs'")
    outputs_asked, form = _read_outputs(outputs, _flag(parameters, "binary_data_output"))
    inputs = tuple(_read_input(entry, position) for position, entry in enumerate(entries))
    return InferHeader(
        inputs,
        typed(document.get("id", ""), str, "'id'"),
        _custom_parameters(parameters),
        unsigned(parameters.get("timeout", 0), "'timeout'") / 1e6 or None,  # on the wire in microseconds
        unsigned(parameters.get("priority", 0), "'priority'"),
        outputs_asked,
        form,
        any(one.place is not None for one in inputs),
        known.json_sequence(parameters),
        any(one.nbytes is not None for one in inputs),
    )


_remembered_header = functools.lru_cache(_REMEMBERED)(read_header)


class BinaryTemplate(NamedTuple):
    """The content of a JSON with binary inputs (name, datatype, shape, nbytes) and no rare features."""

    inputs: tuple[tuple[str, str, tuple[int, ...], int], ...]
    request_id: str
    outputs: tuple[str, ...]
    timeout_s: float | None
    priority: int
    form: OutputForm


@functools.lru_cache(_REMEMBERED)
def binary_template(text: bytes) -> BinaryTemplate | None:
    """Return the template of a JSON, or None if it has none or is invalid: ``header_for`` raises then."""
    try:
        header = _remembered_header(text)
    except RequestError:
        return None
    names, placements, class_counts = header.outputs
    is_rare = header.parameters or placements or class_counts or header.in_regions or header.sequence
    sizes = [(*one[:3], one.nbytes) for one in header.inputs if one.nbytes is not None]
    if is_rare or len(sizes) < len(header.inputs):
        return None
    return BinaryTemplate(
        tuple(sizes), header.request_id, names, header.timeout_s, header.priority, header.form
    )


def _read_skeleton(skeleton: bytes) -> InferHeader:
    return _header(values.loads_skeleton(skeleton))


_remembered_skeleton = functools.lru_cache(_REMEMBERED)(_read_skeleton)


def header_for(model_name: str, text: bytes | bytearray, *, binary: bool) -> tuple[InferHeader, Arrays]:
    """Return the header of a request and its lifted arrays. Errors name the model. Short JSON is cached."""
    is_short = len(text) <= REMEMBERED_NBYTES
    try:
        is_huge = len(text) > MAX_TEXTS_NBYTES
        if not is_huge and binary and is_short and DATA_KEY not in text:
            return _remembered_header(bytes(text)), NO_ARRAYS
        values.check_json_size(len(text))
        lifted = lift(text)
        found = None if lifted is None else _lifted_header(lifted)
        if found is None:
            header = _remembered_header(bytes(text)) if binary and is_short else read_header(text)
            found = header, NO_ARRAYS
        if is_huge:
            check_texts(found[0].request_id, found[0].parameters)
        return found
    except RequestError as error:
        if str(error).startswith(_EXACT):
            raise
        raise type(error)(f"{error} (in a request for model '{shown(model_name)}')") from None


def _lifted_header(lifted: LiftedText) -> tuple[InferHeader, Arrays] | None:
    """Return the header and arrays of a text, or None if it is short and invalid."""
    try:
        skeleton = lifted.skeleton
        try:
            read = _remembered_skeleton if len(skeleton) <= REMEMBERED_NBYTES else _read_skeleton
            header = read(skeleton)
        except values.MalformedJson as error:
            raise values.malformed(error.detail, lifted.origin(error.position)) from None
        arrays = [
            values.lifted_tensor(lifted, number, datatype, elements, name)
            for name, datatype, _, _, _, _, number, elements in header.inputs
            if number is not None
        ]
        return header, iter(arrays)
    except RequestError:
        if len(lifted.text) <= SHORT_NBYTES:
            return None
        raise


def _read_input(entry: Any, position: int) -> HeaderInput:
    typed(entry, dict, f"'inputs[{position}]'")
    name = _entry_name(entry, "input", position)
    shown_name = shown(name)
    datatype = member(entry, "datatype", str, f" of input '{shown_name}'")
    if datatype not in ITEMSIZE:
        raise InvalidArgument(
            f"datatype '{shown(datatype)}' of input '{shown_name}' does not exist; "
            f"use one of {', '.join(ITEMSIZE)}"
        )
    shape = _read_shape(entry, shown_name)
    count = _element_count(shape, datatype, shown_name)
    parameters = typed(entry.get("parameters", {}), dict, f"'parameters' of input '{shown_name}'")
    source = _data_source(entry, parameters, shown_name)
    place = known.region_slice(parameters, name, _KINDS) if parameters else None
    if place is not None:
        return HeaderInput(name, datatype, shape, None, b"", place)
    if source == "binary_data_size":
        nbytes = unsigned(parameters[source], f"'{source}' of input '{shown_name}'")
        return HeaderInput(name, datatype, shape, nbytes)
    if type(entry["data"]) is values.LiftedArray:
        return HeaderInput(name, datatype, shape, None, lifted=entry["data"].number, elements=count)
    data = member(entry, "data", list, f" of input '{shown_name}'")
    return HeaderInput(name, datatype, shape, None, values.tensor_bytes(data, datatype, count, shown_name))


def _entry_name(entry: dict[str, Any], kind: str, position: int) -> str:
    name = member(entry, "name", str, f" of {kind} {position}")
    if not name:
        raise InvalidArgument(f"{kind} {position} of the request has an empty name")
    return name


def _read_shape(entry: dict[str, Any], name: str) -> tuple[int, ...]:
    shape: list[Any] = member(entry, "shape", list, f" of input '{name}'")
    wrong = [dim for dim in shape if type(dim) is not int or not 0 <= dim <= MAX_INT64]
    if wrong:
        negative = [dim for dim in wrong if type(dim) is int and dim < 0]
        raise InvalidArgument(
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer, "
            f"got {values.described((negative or wrong)[0])} for input '{name}'"
        )
    return tuple(shape)


def _element_count(shape: tuple[int, ...], datatype: str, name: str) -> int:
    """Return the number of elements of a shape, up to the first overflow: a shape may be of any length."""
    count = 1
    for dim in shape:
        count *= dim
        if count > MAX_INT64:
            raise InvalidArgument(
                f"shape of input '{name}' causes total element count to exceed maximum size of {MAX_INT64}"
            )
    if count * ITEMSIZE[datatype] > MAX_INT64:
        raise InvalidArgument(f"byte size overflow for input '{name}'")
    return count


def _data_source(entry: dict[str, Any], parameters: dict[str, Any], name: str) -> str:
    given = ["data"] if "data" in entry else []
    given += [field for field in ("binary_data_size", known.REGION) if field in parameters]
    if len(given) == 1:
        return given[0]
    found = " ".join(["set", *(f"'{field}'" for field in given)]) if given else "no field is set"
    raise InvalidArgument(
        f"Input must set only one of the following fields: {_DATA_FIELDS}. But {found} for input '{name}'"
    )


def _read_outputs(entries: list[Any], everything: bool) -> tuple[RequestedOutputs, OutputForm]:
    """Return the requested outputs. A listed output is JSON unless it has ``binary_data``."""
    if not entries:
        return RequestedOutputs(), OutputForm(everything=everything)
    names: list[str] = []
    binary: list[str] = []
    placements: dict[str, RegionSlice] = {}
    class_counts: dict[str, int] = {}
    for position, entry in enumerate(entries):
        typed(entry, dict, f"'outputs[{position}]'")
        name = _entry_name(entry, "output", position)
        parameters = typed(entry.get("parameters", {}), dict, f"'parameters' of output '{shown(name)}'")
        names.append(name)
        if (place := known.region_slice(parameters, name, _KINDS)) is not None:
            placements[name] = place
        if count := known.class_count(parameters, name, _KINDS):
            class_counts[name] = count
            if place is not None:
                raise InvalidArgument(
                    "Output can't set both 'shared_memory_region' and 'classification', "
                    f"as output '{shown(name)}' does"
                )
        if _flag(parameters, "binary_data"):
            binary.append(name)
    return RequestedOutputs(tuple(names), placements, class_counts), OutputForm(frozenset(binary))


def _flag(parameters: dict[str, Any], key: str) -> bool:
    return typed(parameters.get(key, False), bool, f"'{key}'")


def _custom_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters for the model, without those that the protocol reads itself."""
    custom: dict[str, Any] = {}
    for key, value in parameters.items():
        if key in _OWN_PARAMETERS:
            continue
        if key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage "
                "and should not be specified."
            )
        if type(value) not in {bool, int, float, str}:
            raise InvalidArgument(
                f"parameter '{shown(key)}' has invalid type. It should be either 'int', 'bool', or 'string'."
            )
        if type(value) is int and not -MAX_INT64 - 1 <= value <= MAX_INT64:
            raise InvalidArgument(f"parameter '{shown(key)}' is an integer of more than 64 bits")
        custom[key] = value
    return custom
