"""The RPCs that load and unload models, bytes in and bytes out.

KServe's own protocol definition has other fields than Triton's: ``model_name`` comes first, where Triton has
``repository_name``, and the response is not empty. A request whose first field alone is set is taken for one.
"""

from __future__ import annotations

from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from gpuserve.errors import Unimplemented
from gpuserve.front.endpoint.grpc_requests import decode
from gpuserve.front.endpoint.service import InferenceService

#: Field 2 of KServe's responses, ``isLoaded`` and ``isUnloaded``: true.
_DONE: Final = b"\x10\x01"


async def load(service: InferenceService, body: bytes) -> bytes:
    """``RepositoryModelLoad``."""
    request = decode(pb.RepositoryModelLoadRequest, body)
    await service.repository.load(_model(request), _parameters(request))
    return _reply(request)


async def unload(service: InferenceService, body: bytes) -> bytes:
    """``RepositoryModelUnload``."""
    request = decode(pb.RepositoryModelUnloadRequest, body)
    await service.repository.unload(_model(request), _parameters(request))
    return _reply(request)


def _model(request: Any) -> str:
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


def _reply(request: Any) -> bytes:
    if request.model_name:
        return b""
    echo: bytes = pb.RepositoryModelLoadRequest(repository_name=request.repository_name).SerializeToString()
    return echo + _DONE
