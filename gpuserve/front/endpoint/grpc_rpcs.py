"""The small RPCs, bytes in and bytes out: a table from method path to function, under both gRPC doors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.errors import Unimplemented
from gpuserve.front.endpoint import (
    grpc_health,
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
    grpc_health.CHECK: grpc_health.check,
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


def _encoded(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
