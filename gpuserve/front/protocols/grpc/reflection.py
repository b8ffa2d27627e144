"""gRPC server reflection, for clients without the protobuf files, and the descriptors of every gRPC service.

Each answer is independent: a file comes with all its imports, whatever was sent before. The descriptors of
health and reflection are defined here because their packages require another version of protobuf.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2, service_pb2

from gpuserve.core.errors import Code
from gpuserve.front.protocols.grpc.infer_decoder import decode
from gpuserve.front.requests.limits import shown
from gpuserve.front.requests.server_status import STATUS
from gpuserve.front.service.inference_service import InferenceService

#: The versions of the reflection service; their messages are equal.
REFLECTION_PACKAGES: Final = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
#: Method path -> the package of its messages.
METHODS: Final = {
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": REFLECTION_PACKAGES[0],
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": REFLECTION_PACKAGES[1],
}
#: A request is one name. There is no separate limit for each field, because the answer repeats the request.
MAX_REQUEST_NBYTES: Final = 64 << 10


async def replies(
    service: InferenceService, path: str, requests: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Yield the serialised answer to each request, until the client sends no more or the server drains."""
    draining = asyncio.Event()

    def on_change() -> None:
        if service.health.draining:
            draining.set()

    unwatch = service.health.watch(on_change)
    on_change()
    try:
        while (body := await _next_unless(draining, requests)) is not None:
            yield reply(path, body)
    finally:
        unwatch()


def reply(path: str, body: bytes) -> bytes:
    """Return the serialised answer to one request. Raise InvalidArgument if it is malformed."""
    request_type, response_type = schema().reflection_messages(METHODS[path])
    request = decode(request_type, body)
    response = response_type(valid_host=request.host, original_request=request)
    try:
        _fill_response(request, response)
    except KeyError:
        _refuse(response, Code.NOT_FOUND, _not_found(request))
    encoded: bytes = response.SerializeToString()
    return encoded


def _fill_response(request: Any, response: Any) -> None:
    """Fill the response in. Raise KeyError for an unknown file, symbol or extension."""
    pool = schema().pool
    match request.WhichOneof("message_request"):
        case "list_services":
            response.list_services_response.SetInParent()
            for name in schema().services:
                response.list_services_response.service.add(name=name)
        case "file_by_filename":
            _add_files(response, pool.FindFileByName(request.file_by_filename))
        case "file_containing_symbol":
            _add_files(response, _file_of_symbol(pool, request.file_containing_symbol))
        case "file_containing_extension":
            asked = request.file_containing_extension
            extended = pool.FindMessageTypeByName(asked.containing_type)
            _add_files(response, pool.FindExtensionByNumber(extended, asked.extension_number).file)
        case "all_extension_numbers_of_type":
            extended = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
            found = response.all_extension_numbers_response
            found.base_type_name = extended.full_name
            found.extension_number.extend(one.number for one in pool.FindAllExtensions(extended))
        case _:
            text = "the request asks for nothing: 'message_request' is not set"
            _refuse(response, Code.INVALID_ARGUMENT, text)


def _file_of_symbol(pool: Any, symbol: str) -> Any:
    """Return the file that defines a symbol or method. Raise KeyError if there is none."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        service, _, method = symbol.rpartition(".")
        return pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def _add_files(response: Any, file: Any) -> None:
    waiting, added = [file], set()
    while waiting:
        one = waiting.pop(0)
        if one.name not in added:
            added.add(one.name)
            response.file_descriptor_response.file_descriptor_proto.append(one.serialized_pb)
            waiting += one.dependencies


def _refuse(response: Any, code: Code, text: str) -> None:
    response.error_response.error_code = STATUS[code][1]
    response.error_response.error_message = text


def _not_found(request: Any) -> str:
    match request.WhichOneof("message_request"):
        case "file_by_filename":
            return f"no protobuf file '{shown(request.file_by_filename)}'"
        case "file_containing_symbol":
            return f"no symbol '{shown(request.file_containing_symbol)}'"
        case "file_containing_extension":
            asked = request.file_containing_extension
            return f"no extension {asked.extension_number} of message type '{shown(asked.containing_type)}'"
        case _:
            return f"no message type '{shown(request.all_extension_numbers_of_type)}'"


async def _next_unless(stop: asyncio.Event, items: AsyncIterator[bytes]) -> bytes | None:
    """Return the next item, or None after the last one or once ``stop`` is set."""
    item = asyncio.ensure_future(anext(items, None))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({item, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return item.result() if item.done() else None
    finally:
        for task in (item, stopping):
            task.cancel()
        await asyncio.wait({item, stopping})  # nobody reads the connection any more after this returns


# ---- descriptors ---------------------------------------------------------------------------------

_REQUEST: Final = "ServerReflectionRequest"
_RESPONSE: Final = "ServerReflectionResponse"
_Proto: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {"string": _Proto.TYPE_STRING, "bytes": _Proto.TYPE_BYTES, "int32": _Proto.TYPE_INT32}

_Node: TypeAlias = dict[str, Any]


def _field(number: int, kind: str, name: str, **more: Any) -> _Node:
    """Return a message field. ``kind`` is a scalar, or a message or enum of the same file."""
    type_ = {"type": _SCALARS[kind]} if kind in _SCALARS else {"type_name": kind}
    return {"number": number, "name": name, "label": _Proto.LABEL_OPTIONAL, **type_, **more}


def _repeated(number: int, kind: str, name: str) -> _Node:
    return _field(number, kind, name, label=_Proto.LABEL_REPEATED)


def _choice(number: int, kind: str, name: str) -> _Node:
    return _field(number, kind, name, oneof_index=0)


def _message(name: str, *fields: _Node, **more: Any) -> _Node:
    return {"name": name, "field": fields, **more}


def _method(name: str, request: str, response: str, **streams: bool) -> _Node:
    return {"name": name, "input_type": request, "output_type": response, **streams}


_REFLECTION: Final[_Node] = {
    "message_type": [
        _message(
            _REQUEST,
            _field(1, "string", "host"),
            _choice(3, "string", "file_by_filename"),
            _choice(4, "string", "file_containing_symbol"),
            _choice(5, "ExtensionRequest", "file_containing_extension"),
            _choice(6, "string", "all_extension_numbers_of_type"),
            _choice(7, "string", "list_services"),
            oneof_decl=[{"name": "message_request"}],
        ),
        _message(
            "ExtensionRequest", _field(1, "string", "containing_type"), _field(2, "int32", "extension_number")
        ),
        _message(
            _RESPONSE,
            _field(1, "string", "valid_host"),
            _field(2, _REQUEST, "original_request"),
            _choice(4, "FileDescriptorResponse", "file_descriptor_response"),
            _choice(5, "ExtensionNumberResponse", "all_extension_numbers_response"),
            _choice(6, "ListServiceResponse", "list_services_response"),
            _choice(7, "ErrorResponse", "error_response"),
            oneof_decl=[{"name": "message_response"}],
        ),
        _message("FileDescriptorResponse", _repeated(1, "bytes", "file_descriptor_proto")),
        _message(
            "ExtensionNumberResponse",
            _field(1, "string", "base_type_name"),
            _repeated(2, "int32", "extension_number"),
        ),
        _message("ListServiceResponse", _repeated(1, "ServiceResponse", "service")),
        _message("ServiceResponse", _field(1, "string", "name")),
        _message("ErrorResponse", _field(1, "int32", "error_code"), _field(2, "string", "error_message")),
    ],
    "service": [
        {
            "name": "ServerReflection",
            "method": [
                _method(
                    "ServerReflectionInfo", _REQUEST, _RESPONSE, client_streaming=True, server_streaming=True
                )
            ],
        }
    ],
}
_STATES: Final = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_SERVING_STATUS: Final = {
    "name": "ServingStatus",
    "value": [{"name": name, "number": number} for number, name in enumerate(_STATES)],
}
#: Only the methods that are served.
_HEALTH: Final[_Node] = {
    "message_type": [
        _message("HealthCheckRequest", _field(1, "string", "service")),
        _message("HealthCheckResponse", _field(1, "ServingStatus", "status"), enum_type=[_SERVING_STATUS]),
    ],
    "service": [
        {
            "name": "Health",
            "method": [
                _method("Check", "HealthCheckRequest", "HealthCheckResponse"),
                _method("Watch", "HealthCheckRequest", "HealthCheckResponse", server_streaming=True),
            ],
        }
    ],
}


class Schema(NamedTuple):
    """The descriptor ``pool``, the full names of its services, and access to message classes."""

    pool: Any
    services: tuple[str, ...]

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def reflection_messages(self, package: str) -> tuple[Any, Any]:
        return self.message(f"{package}.{_REQUEST}"), self.message(f"{package}.{_RESPONSE}")


@functools.cache
def schema() -> Schema:
    """Return the schema of the process, created at the first use."""
    pool = descriptor_pool.DescriptorPool()
    names: list[str] = []
    generated = (model_config_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR)  # each after its imports
    written = [_file("grpc.health.v1", "health", _HEALTH)]
    written += [_file(package, "reflection", _REFLECTION) for package in REFLECTION_PACKAGES]
    for data in [one.serialized_pb for one in generated] + [one.SerializeToString() for one in written]:
        file = pool.AddSerializedFile(data)
        names += [service.full_name for service in file.services_by_name.values()]
    return Schema(pool, tuple(sorted(names)))


def _file(package: str, name: str, content: _Node) -> Any:
    path = f"{package.replace('.', '/')}/{name}.proto"
    return descriptor_pb2.FileDescriptorProto(name=path, package=package, syntax="proto3", **content)
