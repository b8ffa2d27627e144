"""Server reflection, bytes in and bytes out, for clients without the protobuf files (``schema.py``). Every
answer stands for itself: a file comes with all that it imports, whatever was sent before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from gpuserve.core.errors import Code
from gpuserve.front.doors.grpc.requests import decode
from gpuserve.front.doors.grpc.schema import REFLECTION_PACKAGES, schema
from gpuserve.front.service.service import InferenceService
from gpuserve.front.v2.limits import shown
from gpuserve.front.v2.status import STATUS

#: Method path -> the package whose messages it takes.
METHODS: Final = {
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": REFLECTION_PACKAGES[0],
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": REFLECTION_PACKAGES[1],
}
#: A request is one name. Not a limit of its own for each field: the answer repeats the request.
MAX_REQUEST_NBYTES: Final = 64 << 10


async def replies(
    service: InferenceService, path: str, requests: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """The serialised answer to each request, until the client sends no more or the server drains."""
    draining = asyncio.Event()

    def on_change() -> None:
        if service.health.draining:
            draining.set()

    unwatch = service.health.watch(on_change)
    on_change()
    try:
        while (body := await _next_before(draining, requests)) is not None:
            yield reply(path, body)
    finally:
        unwatch()


def reply(path: str, body: bytes) -> bytes:
    """The serialised answer to one reflection request; InvalidArgument: the bytes are none."""
    request_type, response_type = schema().reflection_messages(METHODS[path])
    request = decode(request_type, body)
    response = response_type(valid_host=request.host, original_request=request)
    try:
        _answer(request, response)
    except KeyError:
        _refuse(response, Code.NOT_FOUND, _not_found(request))
    encoded: bytes = response.SerializeToString()
    return encoded


def _answer(request: Any, response: Any) -> None:
    """Fill the response in; KeyError: there is no such file, symbol or extension."""
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
    """The file that defines a symbol, also a method, which the pool does not know by name; else KeyError."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        service, _, method = symbol.rpartition(".")
        return pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def _add_files(response: Any, file: Any) -> None:
    """The file first, and what it imports after it, each once."""
    waiting, added = [file], set()
    while waiting:
        one = waiting.pop(0)
        if one.name not in added:
            added.add(one.name)
            response.file_descriptor_response.file_descriptor_proto.append(one.serialized_pb)
            waiting += one.dependencies


def _refuse(response: Any, code: Code, text: str) -> None:
    """An error is an answer like any other; the stream goes on."""
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


async def _next_before(stop: asyncio.Event, items: AsyncIterator[bytes]) -> bytes | None:
    """The next item; None after the last one, or once ``stop`` is set."""
    item = asyncio.ensure_future(anext(items, None))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({item, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return item.result() if item.done() else None
    finally:
        for task in (item, stopping):
            task.cancel()
        await asyncio.wait({item, stopping})  # nobody reads the connection any more when this returns
