"""The small RPCs: a table from method path to a function of the service and a message's bytes, under both
gRPC doors. Inference is in ``requests`` and ``responses``; what the answers are is the service's to decide.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.errors import Unimplemented
from gpuserve.front.doors.grpc import health
from gpuserve.front.doors.grpc.requests import decode
from gpuserve.front.memory.regions import RegionKind
from gpuserve.front.service.service import InferenceService
from gpuserve.front.v2 import log_codec, statistics_codec, trace_codec
from gpuserve.front.v2.model_config import model_config
from gpuserve_worker.protocol.tensor import TensorSpec

_SERVICE: Final = "/inference.GRPCInferenceService/"
#: The two methods of inference; the small ones are in ``UNARY``.
MODEL_INFER: Final = _SERVICE + "ModelInfer"
MODEL_STREAM_INFER: Final = _SERVICE + "ModelStreamInfer"
#: Field 2 of KServe's responses to a load and an unload, ``isLoaded`` and ``isUnloaded``: true.
_DONE: Final = b"\x10\x01"

# ---- health and metadata ------------------------------------------------------------------------


def _server_live(service: InferenceService, _: bytes) -> Any:
    return pb.ServerLiveResponse(live=service.health.live)


def _server_ready(service: InferenceService, _: bytes) -> Any:
    return pb.ServerReadyResponse(ready=service.health.ready)


def _model_ready(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.ModelReadyRequest, body)
    return pb.ModelReadyResponse(ready=service.health.model_ready(request.name, request.version))


def _server_metadata(service: InferenceService, _: bytes) -> Any:
    return pb.ServerMetadataResponse(
        name=service.name, version=service.version, extensions=service.extensions
    )


def _model_metadata(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.ModelMetadataRequest, body)
    found = service.models.metadata(request.name, request.version)
    return pb.ModelMetadataResponse(
        name=found.spec.name,
        versions=found.versions,
        platform=found.platform,
        inputs=[_tensor_metadata(tensor, found.batches) for tensor in found.spec.inputs],
        outputs=[_tensor_metadata(tensor, found.batches) for tensor in found.spec.outputs],
    )


def _tensor_metadata(tensor: TensorSpec, batches: bool) -> Any:
    """Where the model batches, every shape gets -1 in front."""
    shape = (-1, *tensor.shape) if batches else tensor.shape
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=shape)


def _model_config(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.ModelConfigRequest, body)
    spec = service.models.find(request.name, request.version).spec
    versions = [one.version for one in service.models.specs(spec.name)]
    return pb.ModelConfigResponse(config=model_config(spec, versions))


def _model_statistics(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.ModelStatisticsRequest, body)
    return statistics_codec.message(service.models.statistics(request.name, request.version))


# ---- settings -----------------------------------------------------------------------------------


def _trace_setting(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.TraceSettingRequest, body)
    settings = service.control.trace.update(request.model_name, trace_codec.parse_message(request))
    return trace_codec.message(settings)


def _log_settings(service: InferenceService, body: bytes) -> Any:
    changes = log_codec.parse_message(decode(pb.LogSettingsRequest, body))
    return log_codec.message(service.control.log.update(changes))


# ---- the repository: KServe's own protocol definition has other fields than Triton's. ``model_name`` comes
# first, where Triton has ``repository_name``, and the response is not empty. A request whose first field
# alone is set is taken for one of KServe's.


def _repository_index(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.RepositoryIndexRequest, body)
    if request.repository_name:
        raise Unimplemented("'repository_name' specification is not supported")
    index = pb.RepositoryIndexResponse.ModelIndex
    entries = service.models.index(ready_only=request.ready)
    return pb.RepositoryIndexResponse(models=[index(**entry._asdict()) for entry in entries])


async def _load(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.RepositoryModelLoadRequest, body)
    await service.control.repository.load(_named_model(request), _parameters(request))
    return _loaded(request)


async def _unload(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.RepositoryModelUnloadRequest, body)
    await service.control.repository.unload(_named_model(request), _parameters(request))
    return _loaded(request)


def _named_model(request: Any) -> str:
    if request.repository_name and request.model_name:
        raise Unimplemented("'repository_name' specification is not supported")
    name: str = request.model_name or request.repository_name
    return name


def _parameters(request: Any) -> dict[str, Any]:
    """By name, as bool, int, str or bytes; None where a parameter has no value."""
    parameters = {}
    for key, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        parameters[key] = None if kind is None else getattr(parameter, kind)
    return parameters


def _loaded(request: Any) -> bytes:
    if request.model_name:
        return b""
    echo: bytes = pb.RepositoryModelLoadRequest(repository_name=request.repository_name).SerializeToString()
    return echo + _DONE


# ---- regions of shared memory -------------------------------------------------------------------


def _system_status(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.SystemSharedMemoryStatusRequest, body)
    response = pb.SystemSharedMemoryStatusResponse()
    for one in service.control.regions.status(RegionKind.SYSTEM, request.name):
        region = response.regions[one.name]
        region.name, region.key, region.offset, region.byte_size = one.name, one.key, one.offset, one.nbytes
    return response


def _system_register(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.SystemSharedMemoryRegisterRequest, body)
    service.control.regions.register_system(request.name, request.key, request.offset, request.byte_size)
    return pb.SystemSharedMemoryRegisterResponse()


def _system_unregister(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.SystemSharedMemoryUnregisterRequest, body)
    service.control.regions.unregister(RegionKind.SYSTEM, request.name)
    return pb.SystemSharedMemoryUnregisterResponse()


def _cuda_status(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.CudaSharedMemoryStatusRequest, body)
    response = pb.CudaSharedMemoryStatusResponse()
    for one in service.control.regions.status(RegionKind.CUDA, request.name):
        region = response.regions[one.name]
        region.name, region.device_id, region.byte_size = one.name, one.device_id, one.nbytes
    return response


async def _cuda_register(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.CudaSharedMemoryRegisterRequest, body)
    await service.control.regions.register_cuda(
        request.name, request.raw_handle, request.device_id, request.byte_size
    )
    return pb.CudaSharedMemoryRegisterResponse()


def _cuda_unregister(service: InferenceService, body: bytes) -> Any:
    request = decode(pb.CudaSharedMemoryUnregisterRequest, body)
    service.control.regions.unregister(RegionKind.CUDA, request.name)
    return pb.CudaSharedMemoryUnregisterResponse()


# ---- the tables ---------------------------------------------------------------------------------

UNARY: Final[dict[str, Callable[[InferenceService, bytes], Any | Awaitable[Any]]]] = {
    _SERVICE + "ServerLive": _server_live,
    _SERVICE + "ServerReady": _server_ready,
    _SERVICE + "ModelReady": _model_ready,
    _SERVICE + "ServerMetadata": _server_metadata,
    _SERVICE + "ModelMetadata": _model_metadata,
    _SERVICE + "ModelConfig": _model_config,
    _SERVICE + "ModelStatistics": _model_statistics,
    _SERVICE + "RepositoryIndex": _repository_index,
    _SERVICE + "RepositoryModelLoad": _load,
    _SERVICE + "RepositoryModelUnload": _unload,
    _SERVICE + "TraceSetting": _trace_setting,
    _SERVICE + "LogSettings": _log_settings,
    _SERVICE + "SystemSharedMemoryStatus": _system_status,
    _SERVICE + "SystemSharedMemoryRegister": _system_register,
    _SERVICE + "SystemSharedMemoryUnregister": _system_unregister,
    _SERVICE + "CudaSharedMemoryStatus": _cuda_status,
    _SERVICE + "CudaSharedMemoryRegister": _cuda_register,
    _SERVICE + "CudaSharedMemoryUnregister": _cuda_unregister,
    health.CHECK: lambda service, body: health.check(service.health, body),
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
    """Run the small RPC of a path, and give its serialised reply.

    Raises:
        RequestError: it fails.
    """
    reply = UNARY[path](service, body)
    if isinstance(reply, Awaitable):
        reply = await reply
    encoded: bytes = reply if isinstance(reply, bytes) else reply.SerializeToString()
    return encoded
