"""Requests as bytes, made before anything is timed: messages of gRPC calls, texts of HTTP requests. A tensor
is in the request, or in a region of shared memory that the request names (``TensorPlace``).
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpuserve.bench.calls import http2
from gpuserve.bench.server.inputs import Array, content
from gpuserve.bench.server.model_metadata import TargetModel
from gpuserve.bench.server.target import Target

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


class TensorPlace(NamedTuple):
    """The place of a tensor in shared memory that the server knows."""

    region: str
    offset: int
    nbytes: int


class Tensors(NamedTuple):
    """The tensors of one request. Without a place a tensor is in the request, or the answer."""

    arrays: Mapping[str, Array]
    input_places: Mapping[str, TensorPlace] = {}
    output_places: Mapping[str, TensorPlace] = {}


class HttpRequest(NamedTuple):
    """A POST, without the headers that every request of the connection has."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def grpc_message(target: Target, model: TargetModel, tensors: Tensors) -> bytes:
    """A serialized ModelInferRequest with raw contents."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=target.model, model_version=target.version)
    for name, array in tensors.arrays.items():
        datatype = _datatype(model, name)
        made = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if name in tensors.input_places:
            _set_place(made.parameters, tensors.input_places[name])
        else:
            request.raw_input_contents.append(content(array, datatype))
    for name, place in tensors.output_places.items():
        _set_place(request.outputs.add(name=name).parameters, place)
    return bytes(request.SerializeToString())


def _set_place(parameters: Any, place: TensorPlace) -> None:
    parameters["shared_memory_region"].string_param = place.region
    parameters["shared_memory_byte_size"].int64_param = place.nbytes
    if place.offset:
        parameters["shared_memory_offset"].int64_param = place.offset


def framed(message: bytes) -> bytes:
    """A message as it lies in the body of a gRPC call: five bytes (flags, length) go before it."""
    return b"\0" + len(message).to_bytes(4) + message


def call_head(target: Target, *, in_streams: bool) -> bytes:
    """The header block that every gRPC call begins with."""
    timeout = f"{max(1, min(99_999_999, int(target.timeout_s * 1e3)))}m"
    path = STREAM_INFER if in_streams else INFER
    scheme = "https" if target.tls else "http"
    more = [("grpc-timeout", timeout), *target.headers]
    return http2.grpc_headers(path, target.url.address, scheme, more)


def http_infer(target: Target, model: TargetModel, tensors: Tensors) -> HttpRequest:
    """A v2 inference request with binary tensors, both ways."""
    bodies: list[bytes] = []
    inputs = []
    for name, array in tensors.arrays.items():
        datatype = _datatype(model, name)
        if name in tensors.input_places:
            parameters = _place_parameters(tensors.input_places[name])
        else:
            bodies.append(content(array, datatype))
            parameters = {"binary_data_size": len(bodies[-1])}
        inputs.append({"name": name, "datatype": datatype, "shape": array.shape, "parameters": parameters})
    document: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if tensors.output_places:
        document["outputs"] = [
            {"name": name, "parameters": _place_parameters(place)}
            for name, place in tensors.output_places.items()
        ]
    head = json.dumps(document, separators=(",", ":")).encode()
    headers = (("inference-header-content-length", str(len(head))),)
    return HttpRequest(_path(target, "infer"), headers, head + b"".join(bodies))


def http_stream(target: Target, tensors: Tensors) -> HttpRequest:
    """A request whose responses come as server-sent events."""
    values = {name: _plain(array.ravel().tolist()) for name, array in tensors.arrays.items()}
    body = json.dumps(values, separators=(",", ":")).encode()
    return HttpRequest(_path(target, "generate_stream"), (("content-type", "application/json"),), body)


def http_bytes(target: Target, request: HttpRequest) -> bytes:
    """An HTTP/1.1 request as it is written to a connection."""
    headers = [
        ("host", target.url.address),
        ("content-length", str(len(request.body))),
        *request.headers,
        *target.headers,
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"POST {request.path} HTTP/1.1\r\n{lines}\r\n".encode() + request.body


def _path(target: Target, verb: str) -> str:
    version = f"/versions/{urllib.parse.quote(target.version, safe='')}" if target.version else ""
    return f"/v2/models/{urllib.parse.quote(target.model, safe='')}{version}/{verb}"


def _place_parameters(place: TensorPlace) -> dict[str, Any]:
    found = {"shared_memory_region": place.region, "shared_memory_byte_size": place.nbytes}
    return found | ({"shared_memory_offset": place.offset} if place.offset else {})


def _datatype(model: TargetModel, name: str) -> str:
    return next(one.datatype for one in model.inputs if one.name == name)


def _plain(elements: Sequence[Any]) -> Any:
    """Text for bytes; the element itself where there is one."""
    texts = [one.decode(errors="replace") if isinstance(one, bytes) else one for one in elements]
    return texts[0] if len(texts) == 1 else texts
