"""gRPC server reflection, for clients without the protobuf files, and the descriptors of every gRPC service.

Each answer is independent: a file comes with all its imports, whatever was sent before. The descriptors of
health and reflection are files beside this module because their packages require another protobuf.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

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


class Schema(NamedTuple):
    """The descriptor ``pool``, the full names of its services, and access to message classes."""

    pool: Any
    services: tuple[str, ...]

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def reflection_messages(self, package: str) -> tuple[Any, Any]:
        name = f"{package}.ServerReflection"
        return self.message(f"{name}Request"), self.message(f"{name}Response")


@functools.cache
def schema() -> Schema:
    """Return the schema of the process, created at the first use."""
    pool = descriptor_pool.DescriptorPool()
    names: list[str] = []
    generated = (model_config_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR)  # each after its imports
    written = [_file("grpc.health.v1", "health")]
    written += [_file(package, "reflection") for package in REFLECTION_PACKAGES]
    for data in [one.serialized_pb for one in generated] + [one.SerializeToString() for one in written]:
        file = pool.AddSerializedFile(data)
        names += [service.full_name for service in file.services_by_name.values()]
    return Schema(pool, tuple(sorted(names)))


def _file(package: str, name: str) -> Any:
    from importlib import resources  # these are slow to import, and most servers never need them

    from google.protobuf import text_format

    text = resources.files(__package__).joinpath(f"{name}.txtpb").read_text()
    path = f"{package.replace('.', '/')}/{name}.proto"
    return text_format.Parse(
        text, descriptor_pb2.FileDescriptorProto(name=path, package=package, syntax="proto3")
    )
