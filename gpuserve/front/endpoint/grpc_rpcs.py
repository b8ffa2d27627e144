"""The small RPCs, bytes in and bytes out: a table from method path to function, under both gRPC doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from gpuserve.front.endpoint import (
    grpc_messages,
    grpc_regions,
    grpc_repository,
    log_codec,
    statistics_codec,
    trace_codec,
)
from gpuserve.front.endpoint.grpc_requests import decode
from gpuserve.front.endpoint.model_config import model_config
from gpuserve.front.endpoint.service import EXTENSIONS, InferenceService

#: None of these requests is longer than a few names.
MAX_REQUEST_NBYTES: Final = 1 << 20
_SERVICE: Final = "/inference.GRPCInferenceService/"
HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
HEALTH_WATCH: Final = "/grpc.health.v1.Health/Watch"
#: ``HealthCheckResponse`` with SERVICE_UNKNOWN, which only ``Watch`` sends.
_SERVICE_UNKNOWN: Final = b"\x08\x03"


def _server_live(service: InferenceService, _: bytes) -> bytes:
    return _encoded(grpc_messages.server_live(service.live))


def _server_ready(service: InferenceService, _: bytes) -> bytes:
    return _encoded(grpc_messages.server_ready(service.ready))


def _model_ready(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.ModelReadyRequest, body)
    return _encoded(grpc_messages.model_ready(service.model_ready(request.name, request.version)))


def _server_metadata(service: InferenceService, _: bytes) -> bytes:
    return _encoded(grpc_messages.server_metadata(service.name, service.version, EXTENSIONS))


def _model_metadata(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.ModelMetadataRequest, body)
    found = service.model_metadata(request.name, request.version)
    return _encoded(
        grpc_messages.model_metadata(
            found.spec.name,
            found.versions,
            found.platform,
            found.spec.inputs,
            found.spec.outputs,
            batches=found.batches,
        )
    )


def _model_config(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.ModelConfigRequest, body)
    spec = service.model(request.name, request.version).spec
    versions = [one.version for one in service.served_versions(spec.name)]
    return _encoded(pb.ModelConfigResponse(config=model_config(spec, versions)))


def _repository_index(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.RepositoryIndexRequest, body)
    if request.repository_name:
        raise Unimplemented("'repository_name' specification is not supported")
    return _encoded(grpc_messages.repository_index(service.repository_index(request.ready)))


def _model_statistics(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.ModelStatisticsRequest, body)
    return _encoded(statistics_codec.message(service.statistics(request.name, request.version)))


def _trace_setting(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.TraceSettingRequest, body)
    settings = service.trace.update(request.model_name, trace_codec.parse_message(request))
    return _encoded(trace_codec.message(settings))


def _log_settings(service: InferenceService, body: bytes) -> bytes:
    changes = log_codec.parse_message(decode(pb.LogSettingsRequest, body))
    return _encoded(log_codec.message(service.log.update(changes)))


def _health_check(service: InferenceService, body: bytes) -> bytes:
    name = health_service(body)
    serving = service.health(name)
    if serving is None:
        raise NotFound(f"no service {name[:128]!r} to check the health of")
    return grpc_messages.health(serving)


UNARY: Final[dict[str, Callable[[InferenceService, bytes], bytes | Awaitable[bytes]]]] = {
    _SERVICE + "ServerLive": _server_live,
    _SERVICE + "ServerReady": _server_ready,
    _SERVICE + "ModelReady": _model_ready,
    _SERVICE + "ServerMetadata": _server_metadata,
    _SERVICE + "ModelMetadata": _model_metadata,
    _SERVICE + "ModelConfig": _model_config,
    _SERVICE + "ModelStatistics": _model_statistics,
    _SERVICE + "RepositoryIndex": _repository_index,
    _SERVICE + "RepositoryModelLoad": grpc_repository.load,
    _SERVICE + "RepositoryModelUnload": grpc_repository.unload,
    _SERVICE + "TraceSetting": _trace_setting,
    _SERVICE + "LogSettings": _log_settings,
    HEALTH_CHECK: _health_check,
    **grpc_regions.METHODS,
}

#: Methods that read settings or change them: whether a message changes any.
CHANGES: Final[dict[str, Callable[[bytes], bool]]] = {
    _SERVICE + "TraceSetting": lambda body: bool(decode(pb.TraceSettingRequest, body).settings),
    _SERVICE + "LogSettings": lambda body: bool(decode(pb.LogSettingsRequest, body).settings),
}


def unimplemented(path: str) -> Unimplemented:
    """What is said of a method that there is not."""
    return Unimplemented(f"method {path[:256]!r} is not implemented by this server")


async def answer(path: str, service: InferenceService, body: bytes) -> bytes:
    """Run the small RPC of a path.

    Raises:
        RequestError: it fails.
    """
    reply = UNARY[path](service, body)
    return reply if isinstance(reply, bytes) else await reply


def health_service(body: bytes) -> str:
    """The one field of a ``HealthCheckRequest`` (1: service), without a package for two messages.

    Raises:
        InvalidArgument: the bytes are none.
    """
    name, position = b"", 0
    while position < len(body):
        if body[position] != 0x0A:
            raise InvalidArgument("the request body is not a HealthCheckRequest")
        length, position = _varint(body, position + 1)
        name = body[position : position + length]
        if len(name) < length:
            raise InvalidArgument("the request body is not a HealthCheckRequest: it is truncated")
        position += length
    return name.decode("utf-8", "replace")


async def health_changes(
    service: InferenceService, name: str, gone: asyncio.Future[None]
) -> AsyncIterator[bytes]:
    """The health of a service now, and again whenever it changes, until ``gone`` is done.

    Raises:
        Unavailable: the front ends.
    """
    changed = asyncio.Event()
    unwatch = service.watch(changed.set)
    said: bytes | None = None
    try:
        while not gone.done():
            serving = service.health(name)
            reply = _SERVICE_UNKNOWN if serving is None else grpc_messages.health(serving)
            if reply != said:
                said = reply
                yield reply
            if service.ended:
                raise Unavailable("the server is shutting down")
            await _either(changed, gone)
            changed.clear()
    finally:
        unwatch()


async def _either(changed: asyncio.Event, gone: asyncio.Future[None]) -> None:
    waiting = asyncio.ensure_future(changed.wait())
    either: set[asyncio.Future[Any]] = {waiting, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _varint(body: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(body) and shift < 64:
        byte = body[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
    raise InvalidArgument("the request body is not a HealthCheckRequest: its protobuf encoding is malformed")


def _encoded(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
