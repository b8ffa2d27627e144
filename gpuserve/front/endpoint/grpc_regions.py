"""The six RPCs about regions of shared memory, bytes in and bytes out. Converts, and asks the table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.front.endpoint.grpc_requests import decode
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.plane.region import RegionKind

_SERVICE: Final = "/inference.GRPCInferenceService/"


def _system_status(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.SystemSharedMemoryStatusRequest, body)
    response = pb.SystemSharedMemoryStatusResponse()
    for one in service.regions.status(RegionKind.SYSTEM, request.name):
        region = response.regions[one.name]
        region.name, region.key, region.offset, region.byte_size = one.name, one.key, one.offset, one.nbytes
    return _encoded(response)


def _system_register(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.SystemSharedMemoryRegisterRequest, body)
    service.regions.register_system(request.name, request.key, request.offset, request.byte_size)
    return _encoded(pb.SystemSharedMemoryRegisterResponse())


def _system_unregister(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.SystemSharedMemoryUnregisterRequest, body)
    service.regions.unregister(RegionKind.SYSTEM, request.name)
    return _encoded(pb.SystemSharedMemoryUnregisterResponse())


def _cuda_status(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.CudaSharedMemoryStatusRequest, body)
    response = pb.CudaSharedMemoryStatusResponse()
    for one in service.regions.status(RegionKind.CUDA, request.name):
        region = response.regions[one.name]
        region.name, region.device_id, region.byte_size = one.name, one.device_id, one.nbytes
    return _encoded(response)


async def _cuda_register(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.CudaSharedMemoryRegisterRequest, body)
    await service.regions.register_cuda(
        request.name, request.raw_handle, request.device_id, request.byte_size
    )
    return _encoded(pb.CudaSharedMemoryRegisterResponse())


def _cuda_unregister(service: InferenceService, body: bytes) -> bytes:
    request = decode(pb.CudaSharedMemoryUnregisterRequest, body)
    service.regions.unregister(RegionKind.CUDA, request.name)
    return _encoded(pb.CudaSharedMemoryUnregisterResponse())


METHODS: Final[dict[str, Callable[[InferenceService, bytes], bytes | Awaitable[bytes]]]] = {
    _SERVICE + "SystemSharedMemoryStatus": _system_status,
    _SERVICE + "SystemSharedMemoryRegister": _system_register,
    _SERVICE + "SystemSharedMemoryUnregister": _system_unregister,
    _SERVICE + "CudaSharedMemoryStatus": _cuda_status,
    _SERVICE + "CudaSharedMemoryRegister": _cuda_register,
    _SERVICE + "CudaSharedMemoryUnregister": _cuda_unregister,
}


def _encoded(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
