"""The HTTP endpoints of the regions of shared memory. Part of the HTTP door."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any, Final

from gpuserve.errors import InvalidArgument
from gpuserve.front.endpoint.asgi import Receive
from gpuserve.front.endpoint.http_json import compact, loads, typed, unsigned
from gpuserve.front.endpoint.request_body import read_body
from gpuserve.front.endpoint.routes import Endpoint, Route
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.plane.region import RegionKind
from gpuserve.front.plane.regions import HANDLE_NBYTES

#: A key or a handle, and two numbers.
MAX_BODY_NBYTES: Final = 1 << 16


def region_endpoints(
    service: InferenceService,
) -> dict[Endpoint, Callable[[Route, Receive], Awaitable[bytes]]]:
    """What answers each of these endpoints, by the body of its response.

    Each raises ``RequestError``: a body is malformed, or the region table refuses.
    """

    async def system_status(route: Route, receive: Receive) -> bytes:
        found = service.regions.status(RegionKind.SYSTEM, route.region_name)
        fields = [
            {"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.nbytes} for one in found
        ]
        return compact(fields).encode()

    async def system_register(route: Route, receive: Receive) -> bytes:
        body = _document(await read_body(receive, MAX_BODY_NBYTES))
        key = typed(_field(body, "key"), str, "'key'")
        offset = unsigned(body.get("offset", 0), "'offset'")
        nbytes = unsigned(_field(body, "byte_size"), "'byte_size'")
        service.regions.register_system(route.region_name, key, offset, nbytes)
        return b""

    async def cuda_status(route: Route, receive: Receive) -> bytes:
        found = service.regions.status(RegionKind.CUDA, route.region_name)
        fields = [{"name": one.name, "device_id": one.device_id, "byte_size": one.nbytes} for one in found]
        return compact(fields).encode()

    async def cuda_register(route: Route, receive: Receive) -> bytes:
        body = _document(await read_body(receive, MAX_BODY_NBYTES))
        handle = read_handle(_field(body, "raw_handle"))
        device_id = unsigned(_field(body, "device_id"), "'device_id'")
        nbytes = unsigned(_field(body, "byte_size"), "'byte_size'")
        await service.regions.register_cuda(route.region_name, handle, device_id, nbytes)
        return b""

    async def system_unregister(route: Route, receive: Receive) -> bytes:
        service.regions.unregister(RegionKind.SYSTEM, route.region_name)
        return b""

    async def cuda_unregister(route: Route, receive: Receive) -> bytes:
        service.regions.unregister(RegionKind.CUDA, route.region_name)
        return b""

    return {
        Endpoint.SYSTEM_REGION_STATUS: system_status,
        Endpoint.SYSTEM_REGION_REGISTER: system_register,
        Endpoint.SYSTEM_REGION_UNREGISTER: system_unregister,
        Endpoint.CUDA_REGION_STATUS: cuda_status,
        Endpoint.CUDA_REGION_REGISTER: cuda_register,
        Endpoint.CUDA_REGION_UNREGISTER: cuda_unregister,
    }


def read_handle(raw: Any) -> bytes:
    """The ``cudaIpcMemHandle_t`` in ``{"b64": "…"}``.

    Raises:
        InvalidArgument: it is none.
    """
    text = typed(_field(typed(raw, dict, "'raw_handle'"), "b64"), str, "'b64' of 'raw_handle'")
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        handle = b""
    if len(handle) != HANDLE_NBYTES:
        raise InvalidArgument(
            "failed to register CUDA shared memory region: 'raw_handle' must be a valid base64 encoded "
            f"cudaIpcMemHandle_t, which has {HANDLE_NBYTES} bytes, got {len(handle)}"
        )
    return handle


def _document(body: bytes) -> dict[str, Any]:
    return typed(loads(body), dict, "the request")


def _field(document: dict[str, Any], name: str) -> Any:
    if name not in document:
        raise InvalidArgument(f"Shared memory register request has no '{name}' field")
    return document[name]
