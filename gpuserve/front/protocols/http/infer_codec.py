"""The inference endpoint of the v2 protocol over HTTP: requests are parsed, responses encoded. Pure.

The JSON part of a request is read in ``infer_json.py``; a large body that arrives in parts is read in
``body_scanner.py``, by the same rules. A request is a JSON object, then the tensors::
    Inference-Header-Content-Length: 142
    {"inputs":[{"name":"x", …, "parameters":{"binary_data_size":64}}]} │ 64 bytes of x │ …

Without that header the whole body is JSON. With the value 0, or with the content type of a file (an image),
the whole body is the only tensor of a model that has a single input (a raw binary request).
"""

from __future__ import annotations

import functools
import re
from typing import Final, TypeAlias

from gpuserve.core.errors import InvalidArgument, NotFound
from gpuserve.front.net.exchange import AnswerHead
from gpuserve.front.protocols.http import infer_json
from gpuserve.front.protocols.http.http_responses import JSON_OK
from gpuserve.front.protocols.http.infer_json import (
    REMEMBERED_NBYTES,
    Arrays,
    HeaderInput,
    InferHeader,
    OutputForm,
)
from gpuserve.front.requests.inference import Data, InferRequest, InferResponse, InputTensor
from gpuserve.front.requests.json_values import compact, tensor_json
from gpuserve.front.requests.limits import shown
from gpuserve.front.requests.parameters import RequestedOutputs
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, TensorSpec, element_count

#: Binary tensors from this size on are not copied out of the body.
LARGE_NBYTES: Final = 64 * 1024
#: The number of cached texts of responses: those of each length differ.
_REMEMBERED: Final = 2048
#: Responses with more outputs are not cached, which bounds the memory of the cache.
_MOST_OUTPUTS: Final = 16
#: An output's name, datatype, shape, size in bytes, and whether it is in a shared-memory region.
_Sizes: TypeAlias = tuple[str, str, tuple[int, ...], int, bool]
Body: TypeAlias = bytes | bytearray | memoryview
#: Head, body, and the size of the body in bytes.
Encoded: TypeAlias = tuple[AnswerHead, list[bytes | memoryview], int]

#: The bytes before each element of a BYTES tensor, its length.
LENGTH_NBYTES: Final = 4
_INT32_MIN: Final = -(1 << 31)
_INT32_MAX: Final = (1 << 31) - 1
_INTEGER: Final = re.compile(r"[+-]?[0-9]+")


def parse_infer_request(
    model_name: str, model_version: str, body: Body, header_length: str | None, spec: ModelSpec | None = None
) -> tuple[InferRequest, OutputForm]:
    """Return a body's request, tensors as views, and the form of its outputs; raise RequestError."""
    if header_length is not None and type(body) is bytes and len(body) <= LARGE_NBYTES:
        json_nbytes = _header_length(header_length)
        if 0 < json_nbytes <= REMEMBERED_NBYTES:
            template = infer_json.binary_template(body[:json_nbytes])
            if template is not None:
                found = _request_by_template(template, model_name, model_version, body, json_nbytes)
                if found is not None:
                    return found, template.form
    if header_length is None:
        if not body:
            raise InvalidArgument(
                f"the body of the request for model '{shown(model_name)}' is empty, expected a JSON object "
                'such as {"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
            )
        text = bytes(body) if isinstance(body, memoryview) else body
        header, arrays = infer_json.header_for(model_name, text, binary=False)
        refuse_binary_inputs(header)
        json_nbytes = len(body)
    else:
        json_nbytes = parse_header_length(header_length, len(body))
        if json_nbytes == 0:
            return _parse_raw_request(model_name, model_version, body, spec)
        header, arrays = infer_json.header_for(model_name, bytes(body[:json_nbytes]), binary=True)
    inputs = _slice_inputs(header, arrays, body, json_nbytes, model_name)
    return header.request(model_name, model_version, inputs), header.form


def _request_by_template(
    template: infer_json.BinaryTemplate, model_name: str, model_version: str, body: bytes, start: int
) -> InferRequest | None:
    """Return the request whose tensors begin at ``start``, or None if their sizes do not fit."""
    sizes, request_id, names, timeout_s, priority, _ = template
    inputs: list[InputTensor] = []
    for name, datatype, shape, nbytes in sizes:
        end = start + nbytes
        inputs.append(InputTensor(name, datatype, shape, body[start:end]))
        start = end
    if start != len(body):
        return None
    return InferRequest(model_name, model_version, request_id, {}, inputs, names, timeout_s, priority)


def parse_header_length(value: str, body_nbytes: int | None) -> int:
    """Return the length of the JSON (``body_nbytes`` None: unknown). Raise InvalidArgument if impossible."""
    length = _header_length(value)
    if length < 0 or (body_nbytes is not None and length > body_nbytes):
        raise header_out_of_range(value, _INT32_MAX if body_nbytes is None else body_nbytes)
    return length


def header_out_of_range(value: str, body_nbytes: int) -> InvalidArgument:
    return InvalidArgument(f"inference header size should be in range (0, {body_nbytes}), got: {value[:64]}")


def missing_data(name: str, nbytes: int, model_name: str) -> InvalidArgument:
    """Return the error for a body that ends ``nbytes`` before an input is complete."""
    return InvalidArgument(
        f"unexpected size for input '{shown(name)}', expecting {nbytes} additional bytes "
        f"for model '{shown(model_name)}'"
    )


def surplus_data(model_name: str) -> InvalidArgument:
    return InvalidArgument(f"unexpected additional input data for model '{shown(model_name)}'")


def raw_header(
    model_name: str, model_version: str, spec: ModelSpec | None, nbytes: int
) -> tuple[InferHeader, bytes]:
    """Return the header that a raw binary request stands for, and the bytes before the body: the length of a
    single BYTES element. Raise InvalidArgument if the declaration does not determine name and shape, NotFound
    if the model is unknown.
    """
    if spec is None:
        version = f" version {model_version}" if model_version else ""
        raise NotFound(f"Request for unknown model: '{shown(model_name)}'{version} is not found")
    if len(spec.inputs) != 1:
        raise InvalidArgument(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} "
            f"inputs in '{shown(model_name)}' model configuration"
        )
    declared = spec.inputs[0]
    shape = raw_shape(declared, nbytes)
    prefix = nbytes.to_bytes(LENGTH_NBYTES, "little") if declared.datatype == BYTES else b""
    batch = (1,) if spec.max_batch_size > 0 else ()
    one = HeaderInput(declared.name, declared.datatype, batch + shape, len(prefix) + nbytes)
    form = OutputForm(everything=True)
    return InferHeader((one,), "", {}, None, 0, RequestedOutputs(), form, binary=True), prefix


def encode_infer_response(response: InferResponse, form: OutputForm) -> Encoded:
    """Return a response's head, body (not copied) and size. Raise InvalidArgument without a JSON form."""
    outputs = response.outputs
    is_plain = not (response.id or response.parameters) and len(outputs) <= _MOST_OUTPUTS
    if is_plain and (form.everything or form.names):
        sizes = tuple([(one.name, one.datatype, one.shape, len(one.data), one.placed) for one in outputs])
        around = _binary_template(response.model_name, response.model_version, sizes, form)
        if around is not None:
            head, json_text, nbytes = around
            return head, [json_text, *[one.data for one in outputs]], nbytes
    return _encode_any(response, form)


def encode_file(response: InferResponse, media_type: str) -> Encoded:
    """Return the only output's bytes, or its only BYTES element, as a response; raise InvalidArgument."""
    data = response.outputs[0].data if len(response.outputs) == 1 else b""
    is_one = len(response.outputs) == 1 and not response.outputs[0].placed
    if is_one and response.outputs[0].datatype == BYTES:
        length = int.from_bytes(data[:LENGTH_NBYTES], "little")
        data = memoryview(data)[LENGTH_NBYTES:]
        is_one = length == len(data)
    if not is_one:
        raise InvalidArgument(
            f"accept: {media_type} needs an answer with one output, and with one element if its datatype is "
            f"BYTES, but model '{shown(response.model_name)}' answered with "
            f"{', '.join(f'{one.name} {one.datatype} {list(one.shape)}' for one in response.outputs)}"
        )
    head = AnswerHead(200, ((b"content-type", media_type.encode("latin-1")),))
    return head, [data], len(data)


@functools.lru_cache(_REMEMBERED)
def _binary_template(
    model_name: str, model_version: str, outputs: tuple[_Sizes, ...], form: OutputForm
) -> tuple[AnswerHead, bytes, int] | None:
    """Return head, JSON and size for outputs of these sizes, or None if some are not binary."""
    if any(placed or not (form.everything or name in form.names) for name, *_, placed in outputs):
        return None
    entries = b",".join([_binary_entry(*one[:4]) for one in outputs])
    text = b'%b"outputs":[%b]}' % (_model_members(model_name, model_version), entries)
    return _binary_head(len(text)) if outputs else JSON_OK, text, len(text) + sum([one[3] for one in outputs])


def _encode_any(response: InferResponse, form: OutputForm) -> Encoded:
    text: list[bytes | memoryview] = [_response_members(response)]
    binary: list[bytes | memoryview] = []
    for output in response.outputs:
        if output.placed:
            members = _tensor_members(output.name, output.datatype, output.shape)
            text.append(members.removesuffix(b",") + b"}")  # the data is in the client's region
        elif form.everything or output.name in form.names:
            text.append(_binary_entry(output.name, output.datatype, output.shape, len(output.data)))
            binary.append(output.data)
        else:
            name, datatype, shape = output.name, output.datatype, output.shape
            text.append(_tensor_members(name, datatype, shape) + b'"data":')
            text += tensor_json(output.data, datatype, shape, name)
            text.append(b"}")
        text.append(b",")
    text[-1 if response.outputs else len(text) :] = (b"]}",)
    json_nbytes = sum(map(len, text))
    nbytes = json_nbytes + sum(map(len, binary))
    pieces = [*text, *binary] if json_nbytes > LARGE_NBYTES else [b"".join(text), *binary]
    return (_binary_head(json_nbytes) if binary else JSON_OK), pieces, nbytes


@functools.lru_cache(64)
def _header_length(value: str) -> int:
    if value.isdecimal() and value.isascii() and len(value) < 10:
        return int(value)
    value = value.strip()
    if _INTEGER.fullmatch(value) is None:
        raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {value[:64]}")
    digits = value.lstrip("+-").lstrip("0") or "0"
    length = int(digits) if len(digits) < 19 else 1 << 63
    if value.startswith("-"):
        length = -length
    if not _INT32_MIN <= length <= _INT32_MAX:
        raise InvalidArgument(
            "Unable to parse Inference-Header-Content-Length, value is out of range "
            f"[ {_INT32_MIN}, {_INT32_MAX} ], got: {value[:64]}"
        )
    return length


def refuse_binary_inputs(header: InferHeader) -> None:
    """Raise InvalidArgument for binary inputs without a header length: the end of the JSON is unknown."""
    if header.binary:
        raise InvalidArgument(
            "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' "
            "when passing inputs in binary data format"
        )


def _slice_inputs(
    header: InferHeader, arrays: Arrays, body: Body, start: int, model_name: str
) -> list[InputTensor]:
    inputs: list[InputTensor] = []
    for one in header.inputs:
        if one.nbytes is None:
            data: Data = one.own_data(arrays)
        else:
            end = start + one.nbytes
            if end > len(body):
                raise missing_data(one.name, end - len(body), model_name)
            data = bytes(body[start:end]) if one.nbytes < LARGE_NBYTES else memoryview(body)[start:end]
            start = end
        inputs.append(InputTensor(one.name, one.datatype, one.shape, data))
    if start != len(body):
        raise surplus_data(model_name)
    return inputs


def _parse_raw_request(
    model_name: str, model_version: str, body: Body, spec: ModelSpec | None
) -> tuple[InferRequest, OutputForm]:
    header, prefix = raw_header(model_name, model_version, spec, len(body))
    one = header.inputs[0]
    data: Data = prefix + body if prefix else bytes(body) if len(body) < LARGE_NBYTES else memoryview(body)
    inputs = [InputTensor(one.name, one.datatype, one.shape, data)]
    return header.request(model_name, model_version, inputs), header.form


def raw_shape(declared: TensorSpec, nbytes: int) -> tuple[int, ...]:
    """Return the shape of a tensor of ``nbytes``: one dimension may be open and gets the remainder."""
    variable = declared.shape.count(-1)
    if declared.datatype == BYTES:
        if variable or element_count(declared.shape) != 1:
            raise InvalidArgument(
                f"For BYTE datatype raw input '{declared.name}', the model must have input shape [1]"
            )
        return declared.shape
    if variable > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{declared.name}' can not be deduced because there are more "
            "than one variable-sized dimension"
        )
    if variable == 0:
        return declared.shape
    row_nbytes = -element_count(declared.shape) * ITEMSIZE[declared.datatype]
    if nbytes % row_nbytes if row_nbytes else nbytes:
        raise InvalidArgument(
            f"the raw input '{declared.name}' has {nbytes} bytes, which is no multiple of the "
            f"{row_nbytes} bytes that one step of its variable-sized dimension takes"
        )
    return tuple(nbytes // row_nbytes if dim == -1 and row_nbytes else max(dim, 0) for dim in declared.shape)


def _response_members(response: InferResponse) -> bytes:
    head = _model_members(response.model_name, response.model_version)
    if response.id or response.parameters:
        request_id = f'"id":{compact(response.id)},' if response.id else ""
        parameters = f'"parameters":{compact(response.parameters)},' if response.parameters else ""
        head = b"{%b%b%b" % (request_id.encode(), head[1:], parameters.encode())
    return head + b'"outputs":['


@functools.lru_cache(256)
def _binary_head(json_nbytes: int) -> AnswerHead:
    """Return the head of a response with binary tensors after so many bytes of JSON."""
    length = b"inference-header-content-length", b"%d" % json_nbytes
    return AnswerHead(200, ((b"content-type", b"application/octet-stream"), length))


@functools.lru_cache(256)
def _model_members(model_name: str, model_version: str) -> bytes:
    return f'{{"model_name":{compact(model_name)},"model_version":{compact(model_version)},'.encode()


@functools.lru_cache(_REMEMBERED)
def _binary_entry(name: str, datatype: str, shape: tuple[int, ...], nbytes: int) -> bytes:
    return b'%b"parameters":{"binary_data_size":%d}}' % (_tensor_members(name, datatype, shape), nbytes)


@functools.lru_cache(_REMEMBERED)
def _tensor_members(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    return f'{{"name":{compact(name)},"datatype":"{datatype}","shape":{compact(shape)},'.encode()
