"""The small RPCs: a table from method to a function of the service and the request's message. Inference is in
``requests`` and ``responses``; what the answers are is the service's to decide.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import Unimplemented
from gpuserve.front.doors.grpc import health
from gpuserve.front.doors.grpc.parameters import tensor_parameters
from gpuserve.front.doors.grpc.requests import decode
from gpuserve.front.memory.regions import RegionKind
from gpuserve.front.service.service import InferenceService
from gpuserve.front.v2 import log_codec, statistics_codec, trace_codec

_SERVICE: Final = "/inference.GRPCInferenceService/"
#: The two methods of inference; the small ones are in ``UNARY``.
MODEL_INFER: Final = _SERVICE + "ModelInfer"
MODEL_STREAM_INFER: Final = _SERVICE + "ModelStreamInfer"
#: Those that ask for readiness.
SERVER_READY: Final = _SERVICE + "ServerReady"
MODEL_READY: Final = _SERVICE + "ModelReady"
#: Field 2 of KServe's responses to a load and an unload, ``isLoaded`` and ``isUnloaded``: true.
_DONE: Final = b"\x10\x01"

# ---- the repository: KServe's own protocol definition has other fields than Triton's. ``model_name`` comes
# first, where Triton has ``repository_name``, and the response is not empty. A request whose first field
# alone is set is taken for one of KServe's.


def _repository_index(service: InferenceService, request: Any) -> Any:
    if request.repository_name:
        raise Unimplemented("'repository_name' specification is not supported")
    index = pb.RepositoryIndexResponse.ModelIndex
    entries = service.models.index(ready_only=request.ready)
    return pb.RepositoryIndexResponse(models=[index(**entry._asdict()) for entry in entries])


async def _load(service: InferenceService, request: Any) -> bytes:
    await service.control.repository.load(_named_model(request), tensor_parameters(request.parameters))
    return _loaded(request)


async def _unload(service: InferenceService, request: Any) -> bytes:
    await service.control.repository.unload(_named_model(request), tensor_parameters(request.parameters))
    return _loaded(request)


def _named_model(request: Any) -> str:
    if request.repository_name and request.model_name:
        raise Unimplemented("'repository_name' specification is not supported")
    name: str = request.model_name or request.repository_name
    return name


def _loaded(request: Any) -> bytes:
    if request.model_name:
        return b""
    echo: bytes = pb.RepositoryModelLoadRequest(repository_name=request.repository_name).SerializeToString()
    return echo + _DONE


# ---- settings and regions of shared memory ------------------------------------------------------


def _trace_setting(service: InferenceService, request: Any) -> Any:
    changes = trace_codec.parse_message(request)
    return trace_codec.message(service.control.trace.update(request.model_name, changes))


def _log_settings(service: InferenceService, request: Any) -> Any:
    return log_codec.message(service.control.log.update(log_codec.parse_message(request)))


def _system_status(service: InferenceService, request: Any) -> Any:
    response = pb.SystemSharedMemoryStatusResponse()
    for one in service.control.regions.status(RegionKind.SYSTEM, request.name):
        region = response.regions[one.name]
        region.name, region.key, region.offset, region.byte_size = one.name, one.key, one.offset, one.nbytes
    return response


def _system_unregister(service: InferenceService, request: Any) -> Any:
    service.control.regions.unregister(RegionKind.SYSTEM, request.name)
    return pb.SystemSharedMemoryUnregisterResponse()


def _cuda_status(service: InferenceService, request: Any) -> Any:
    response = pb.CudaSharedMemoryStatusResponse()
    for one in service.control.regions.status(RegionKind.CUDA, request.name):
        region = response.regions[one.name]
        region.name, region.device_id, region.byte_size = one.name, one.device_id, one.nbytes
    return response


async def _cuda_register(service: InferenceService, request: Any) -> Any:
    await service.control.regions.register_cuda(
        request.name, request.raw_handle, request.device_id, request.byte_size
    )
    return pb.CudaSharedMemoryRegisterResponse()


def _cuda_unregister(service: InferenceService, request: Any) -> Any:
    service.control.regions.unregister(RegionKind.CUDA, request.name)
    return pb.CudaSharedMemoryUnregisterResponse()


# ---- the tables ---------------------------------------------------------------------------------

#: What answers the message of a method; the message of ``Name`` is a ``NameRequest``.
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
        statistics_codec.message(service.models.statistics(request.name, request.version))
        if request.name or request.version
        else service.statistics[1].page()
    ),
    "RepositoryIndex": _repository_index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
    "TraceSetting": _trace_setting,
    "LogSettings": _log_settings,
    "SystemSharedMemoryStatus": _system_status,
    "SystemSharedMemoryUnregister": _system_unregister,
    "CudaSharedMemoryStatus": _cuda_status,
    "CudaSharedMemoryRegister": _cuda_register,
    "CudaSharedMemoryUnregister": _cuda_unregister,
}
#: The paths of all methods that take one message and give one, but for inference.
UNARY: Final = frozenset({health.CHECK, *(_SERVICE + name for name in _METHODS)})
#: And that of the one for which it matters who calls.
SYSTEM_REGISTER: Final = _SERVICE + "SystemSharedMemoryRegister"

#: Methods that read settings or change them: whether a message changes any.
CHANGES: Final[dict[str, Callable[[bytes], bool]]] = {
    _SERVICE + "TraceSetting": lambda body: bool(decode(pb.TraceSettingRequest, body).settings),
    _SERVICE + "LogSettings": lambda body: bool(decode(pb.LogSettingsRequest, body).settings),
}


def system_register(service: InferenceService, body: bytes, client: int | None) -> bytes:
    """Register what a message says for a client of that user, and give the serialised reply."""
    asked = decode(pb.SystemSharedMemoryRegisterRequest, body)
    service.control.regions.register_system(asked.name, asked.key, asked.offset, asked.byte_size, client)
    return b""


def unimplemented(path: str) -> Unimplemented:
    """What is said of a method that there is not."""
    return Unimplemented(f"method {path[:256]!r} is not implemented by this server")


async def answer(path: str, service: InferenceService, body: bytes) -> bytes:
    """Run the small RPC of a path, and give its serialised reply; RequestError: it fails."""
    if path == health.CHECK:
        return health.check(service.health, body)
    name = path.removeprefix(_SERVICE)
    reply = _METHODS[name](service, decode(getattr(pb, f"{name}Request"), body))
    if isinstance(reply, Awaitable):
        reply = await reply
    encoded: bytes = reply if isinstance(reply, bytes) else reply.SerializeToString()
    return encoded
