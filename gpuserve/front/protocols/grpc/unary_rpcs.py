"""Unary RPCs other than inference, as a table from method to a function of the service and the request
message, and ``grpc.health.v1``. The service decides on the answers; this module only converts messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import NotFound, Stopping, Unimplemented
from gpuserve.front.ipc.shared_memory import RegionKind
from gpuserve.front.net.async_requests import AsyncRequest
from gpuserve.front.protocols.grpc.grpc_protocol import OK_HEADERS, CallHead, frame, small_message
from gpuserve.front.protocols.grpc.infer_decoder import decode, tensor_parameters
from gpuserve.front.protocols.grpc.reflection import schema
from gpuserve.front.requests import admin_codec
from gpuserve.front.requests.server_status import HealthSource
from gpuserve.front.service.inference_service import InferenceService

HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
HEALTH_WATCH: Final = "/grpc.health.v1.Health/Watch"
_REQUEST: Final = "grpc.health.v1.HealthCheckRequest"
#: ``HealthCheckResponse`` with SERVICE_UNKNOWN, which only ``Watch`` sends.
_SERVICE_UNKNOWN: Final = b"\x08\x03"


def health_message(serving: bool) -> bytes:
    """Return a serialised ``HealthCheckResponse``: field 1 is 1 (SERVING) or 2 (NOT_SERVING)."""
    return b"\x08\x01" if serving else b"\x08\x02"


def check_health(source: HealthSource, body: bytes) -> bytes:
    """Answer ``Check``. Raise InvalidArgument if malformed, NotFound for an unknown service."""
    name = decode(schema().message(_REQUEST), body).service
    serving = source.of(name)
    if serving is None:
        raise NotFound(f"no service {name[:128]!r} to check the health of")
    return health_message(serving)


async def serve_health_watch(source: HealthSource, call: CallHead, request: AsyncRequest) -> None:
    """Answer ``Watch`` until the client leaves. Raises ClientGone, or Stopping at the server's end."""
    body = await small_message(call, request)
    name = decode(schema().message(_REQUEST), body).service
    exchange = request.exchange
    exchange.start(200, OK_HEADERS)
    changed = asyncio.Event()
    unwatch = source.watch(changed.set)
    said: bytes | None = None
    try:
        while True:
            serving = source.of(name)
            reply = _SERVICE_UNKNOWN if serving is None else health_message(serving)
            if reply != said:
                said = reply
                exchange.send(frame(len(reply)) + reply)
                await exchange.room()
            if source.ended:
                raise Stopping("the server is shutting down")
            await request.wait_unless_gone(asyncio.ensure_future(changed.wait()))
            changed.clear()
    finally:
        unwatch()


# ---- inference.GRPCInferenceService --------------------------------------------------------------

_SERVICE: Final = "/inference.GRPCInferenceService/"
#: The two inference methods; all others are in ``UNARY``.
MODEL_INFER: Final = _SERVICE + "ModelInfer"
MODEL_STREAM_INFER: Final = _SERVICE + "ModelStreamInfer"
#: The readiness methods.
SERVER_READY: Final = _SERVICE + "ServerReady"
MODEL_READY: Final = _SERVICE + "ModelReady"
#: Field 2 of KServe's load and unload responses, ``isLoaded`` and ``isUnloaded``: true.
_DONE: Final = b"\x10\x01"

# KServe's protocol definition has other fields for the repository than Triton's: ``model_name`` comes first,
# where Triton has ``repository_name``, and the response is not empty. A request that sets only its first
# field is treated as one of KServe.


def _repository_index(service: InferenceService, request: Any) -> Any:
    if request.repository_name:
        raise Unimplemented("'repository_name' specification is not supported")
    index = pb.RepositoryIndexResponse.ModelIndex
    entries = service.models.index(ready_only=request.ready)
    return pb.RepositoryIndexResponse(models=[index(**entry._asdict()) for entry in entries])


async def _change_model(change: Callable[[str, dict[str, Any]], Awaitable[Any]], request: Any) -> bytes:
    if request.repository_name and request.model_name:
        raise Unimplemented("'repository_name' specification is not supported")
    await change(request.model_name or request.repository_name, tensor_parameters(request.parameters))
    if request.model_name:
        return b""
    echo: bytes = pb.RepositoryModelLoadRequest(repository_name=request.repository_name).SerializeToString()
    return echo + _DONE


# ---- settings and regions of shared memory ------------------------------------------------------


def _region_status(kind: RegionKind, response: Any, service: InferenceService, request: Any) -> Any:
    found = service.control.regions.status(kind, request.name)
    return response(regions={one.name: one.members(kind) for one in found})


# ---- the tables ---------------------------------------------------------------------------------

#: Method name -> function that answers its message, with None for an empty message. The message of ``Name``
#: is a ``NameRequest``.
_METHODS: Final[dict[str, Callable[[InferenceService, Any], Any | Awaitable[Any]]]] = {
    "ServerLive": lambda service, _: pb.ServerLiveResponse(live=service.health.live),
    "ServerReady": lambda service, _: pb.ServerReadyResponse(ready=service.health.ready),
    "ModelReady": lambda service, request: pb.ModelReadyResponse(
        ready=service.health.model_ready(request.name, request.version)
    ),
    "ServerMetadata": lambda service, _: pb.ServerMetadataResponse(**service.metadata()),
    "ModelMetadata": lambda service, request: pb.ModelMetadataResponse(
        **service.models.metadata(request.name, request.version)
    ),
    "ModelConfig": lambda service, request: pb.ModelConfigResponse(
        config=service.models.config(request.name, request.version)
    ),
    "ModelStatistics": lambda service, request: (
        admin_codec.statistics_message(service.models.statistics(request.name, request.version))
        if request.name or request.version
        else service.statistics[1].page()
    ),
    "RepositoryIndex": _repository_index,
    "RepositoryModelLoad": lambda service, request: _change_model(service.control.repository.load, request),
    "RepositoryModelUnload": lambda service, request: _change_model(
        service.control.repository.unload, request
    ),
    "TraceSetting": lambda service, request: admin_codec.trace_message(
        service.control.trace.update(request.model_name, admin_codec.parse_trace_message(request))
    ),
    "LogSettings": lambda service, request: admin_codec.log_message(
        service.control.log.update(admin_codec.parse_log_message(request))
    ),
    "SystemSharedMemoryStatus": partial(
        _region_status, RegionKind.SYSTEM, pb.SystemSharedMemoryStatusResponse
    ),
    "SystemSharedMemoryUnregister": lambda service, request: service.control.regions.unregister(
        RegionKind.SYSTEM, request.name
    ),
    "CudaSharedMemoryStatus": partial(_region_status, RegionKind.CUDA, pb.CudaSharedMemoryStatusResponse),
    "CudaSharedMemoryRegister": lambda service, request: service.control.regions.register_cuda(
        request.name, request.raw_handle, request.device_id, request.byte_size
    ),
    "CudaSharedMemoryUnregister": lambda service, request: service.control.regions.unregister(
        RegionKind.CUDA, request.name
    ),
}
#: The unary method whose answer depends on the caller's user.
SYSTEM_REGISTER: Final = _SERVICE + "SystemSharedMemoryRegister"
#: The paths of all methods with one request message and one response, except inference.
UNARY: Final = frozenset({HEALTH_CHECK, SYSTEM_REGISTER, *(_SERVICE + name for name in _METHODS)})
#: Methods that read or change settings -> whether a message changes any.
CHANGES: Final[dict[str, Callable[[bytes], bool]]] = {
    _SERVICE + "TraceSetting": lambda body: bool(decode(pb.TraceSettingRequest, body).settings),
    _SERVICE + "LogSettings": lambda body: bool(decode(pb.LogSettingsRequest, body).settings),
}


def unimplemented(path: str) -> Unimplemented:
    """Return the error for an unknown method."""
    return Unimplemented(f"method {path[:256]!r} is not implemented by this server")


async def answer(path: str, service: InferenceService, body: bytes, client_uid: int | None) -> bytes:
    """Run the unary RPC of a path, and return its serialised reply. Raise RequestError if it fails."""
    if path == HEALTH_CHECK:
        return check_health(service.health, body)
    name = path.removeprefix(_SERVICE)
    message = decode(getattr(pb, f"{name}Request"), body)
    if path == SYSTEM_REGISTER:
        region = message.name, message.key, message.offset, message.byte_size
        service.control.regions.register_system(*region, client_uid)
        return b""
    reply = _METHODS[name](service, message)
    if isinstance(reply, Awaitable):
        reply = await reply
    if reply is None or isinstance(reply, bytes):
        return reply or b""
    encoded: bytes = reply.SerializeToString()
    return encoded
