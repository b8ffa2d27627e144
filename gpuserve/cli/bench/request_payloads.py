"""Requests as bytes, built before anything is timed: messages of gRPC calls, texts of HTTP requests. A tensor
is in the request, or in a region of shared memory that the request names (``TensorPlace``).
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpuserve.cli.bench import http2_client
from gpuserve.cli.bench.load_plan import BenchOptionError
from gpuserve.cli.bench.loader_messages import ClientTlsFiles
from gpuserve.cli.bench.request_tensors import Array, TargetModel, tensor_bytes
from gpuserve.client.client_settings import GRPC, ServerUrl
from gpuserve.client.exceptions import ClientInvalidUrlError

PROTOCOLS = ("grpc", "http")
_OWN_HEADERS = frozenset(
    {"content-length", "content-type", "host", "te", "transfer-encoding", "connection", "grpc-timeout"}
)


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server, and the options of every call. ``version`` "": the server's choice."""

    url: ServerUrl
    model: str
    version: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    tls: ClientTlsFiles | None = None
    timeout_s: float = 30.0

    @property
    def is_grpc(self) -> bool:
        return self.url.protocol == GRPC


def parse_url(url: str | None, protocol: str | None) -> ServerUrl:
    """Return the server of ``--server`` and ``--protocol``. Raise BenchOptionError if they are wrong."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise BenchOptionError("--protocol", f"expected grpc or http, given {protocol!r}")
    text = "localhost" if url is None else url
    try:
        found = ServerUrl.parse(text if "://" in text else f"{protocol or GRPC}://{text}")
    except ClientInvalidUrlError as error:
        raise BenchOptionError("--server", str(error)) from None
    if protocol is not None and found.protocol != protocol:
        raise BenchOptionError("--protocol", f"{protocol} does not go with --server {url}")
    return found


def parse_headers(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return headers given as ``name: value``. Raise BenchOptionError for others, or for headers set here."""
    found = []
    for text in texts:
        name, colon, value = text.partition(":")
        name = name.strip().lower()
        if not (colon and name and name.isascii() and name.isprintable()) or "\n" in value or "\r" in value:
            raise BenchOptionError("--header", f"expected name: value, given {text!r}")
        if name in _OWN_HEADERS:
            raise BenchOptionError("--header", f"{name} is set by the load generator itself")
        found.append((name, value.strip()))
    return tuple(found)


INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


class TensorPlace(NamedTuple):
    """The location of a tensor in a registered region of shared memory."""

    region: str
    offset: int
    nbytes: int


class Tensors(NamedTuple):
    """The tensors of one request. A tensor without a place is in the request, or in the answer."""

    arrays: Mapping[str, Array]
    input_places: Mapping[str, TensorPlace] = {}
    output_places: Mapping[str, TensorPlace] = {}


class HttpRequest(NamedTuple):
    """A POST request, without the headers common to all requests of the connection."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def grpc_message(target: Target, model: TargetModel, tensors: Tensors) -> bytes:
    """Return a serialized ModelInferRequest with raw contents."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=target.model, model_version=target.version)
    for name, array in tensors.arrays.items():
        datatype = _datatype(model, name)
        made = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if name in tensors.input_places:
            _set_place(made.parameters, tensors.input_places[name])
        else:
            request.raw_input_contents.append(tensor_bytes(array, datatype))
    for name, place in tensors.output_places.items():
        _set_place(request.outputs.add(name=name).parameters, place)
    return bytes(request.SerializeToString())


def _set_place(parameters: Any, place: TensorPlace) -> None:
    parameters["shared_memory_region"].string_param = place.region
    parameters["shared_memory_byte_size"].int64_param = place.nbytes
    if place.offset:
        parameters["shared_memory_offset"].int64_param = place.offset


def grpc_frame(message: bytes) -> bytes:
    """Return a message with its gRPC prefix of five bytes (flags, length)."""
    return b"\0" + len(message).to_bytes(4) + message


def grpc_header_block(target: Target, *, in_streams: bool) -> bytes:
    """Return the header block of every gRPC call."""
    timeout = f"{max(1, min(99_999_999, int(target.timeout_s * 1e3)))}m"
    path = STREAM_INFER if in_streams else INFER
    scheme = "https" if target.tls else "http"
    more = [("grpc-timeout", timeout), *target.headers]
    return http2_client.grpc_headers(path, target.url.address, scheme, more)


def http_infer(target: Target, model: TargetModel, tensors: Tensors) -> HttpRequest:
    """Return a v2 inference request with binary tensors in both directions."""
    bodies: list[bytes] = []
    inputs = []
    for name, array in tensors.arrays.items():
        datatype = _datatype(model, name)
        if name in tensors.input_places:
            parameters = _place_parameters(tensors.input_places[name])
        else:
            bodies.append(tensor_bytes(array, datatype))
            parameters = {"binary_data_size": len(bodies[-1])}
        inputs.append({"name": name, "datatype": datatype, "shape": array.shape, "parameters": parameters})
    document: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if places := tensors.output_places:
        document["outputs"] = [
            {"name": name, "parameters": _place_parameters(place)} for name, place in places.items()
        ]
    head = json.dumps(document, separators=(",", ":")).encode()
    headers = (("inference-header-content-length", str(len(head))),)
    return HttpRequest(f"{model_path(target)}/infer", headers, head + b"".join(bodies))


def http_stream(target: Target, tensors: Tensors) -> HttpRequest:
    """Return a request whose responses arrive as server-sent events."""
    values = {}
    for name, array in tensors.arrays.items():
        elements = array.ravel().tolist()
        texts = [one.decode(errors="replace") if isinstance(one, bytes) else one for one in elements]
        values[name] = texts[0] if len(texts) == 1 else texts
    body = json.dumps(values, separators=(",", ":")).encode()
    headers = (("content-type", "application/json"),)
    return HttpRequest(f"{model_path(target)}/generate_stream", headers, body)


def http_bytes(target: Target, request: HttpRequest) -> bytes:
    """Return an HTTP/1.1 request as bytes."""
    length = "content-length", str(len(request.body))
    headers = [("host", target.url.address), length, *request.headers, *target.headers]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"POST {request.path} HTTP/1.1\r\n{lines}\r\n".encode() + request.body


def model_path(target: Target) -> str:
    version = f"/versions/{urllib.parse.quote(target.version, safe='')}" if target.version else ""
    return f"/v2/models/{urllib.parse.quote(target.model, safe='')}{version}"


def _place_parameters(place: TensorPlace) -> dict[str, Any]:
    found = {"shared_memory_region": place.region, "shared_memory_byte_size": place.nbytes}
    return found | ({"shared_memory_offset": place.offset} if place.offset else {})


def _datatype(model: TargetModel, name: str) -> str:
    return next(one.datatype for one in model.inputs if one.name == name)
