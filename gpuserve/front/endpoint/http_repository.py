"""The HTTP endpoints of the model repository: its index, loading and unloading. Part of the HTTP door."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any, Final

from gpuserve.errors import Internal, InvalidArgument, Unimplemented
from gpuserve.front.endpoint import http_bodies
from gpuserve.front.endpoint.asgi import Receive
from gpuserve.front.endpoint.http_json import loads
from gpuserve.front.endpoint.request_body import read_body
from gpuserve.front.endpoint.routes import Endpoint, Route
from gpuserve.front.endpoint.service import InferenceService

#: The largest is a config override, some kilobytes.
MAX_BODY_NBYTES: Final = 4 << 20


def repository_endpoints(
    service: InferenceService,
) -> dict[Endpoint, Callable[[Route, Receive], Awaitable[bytes]]]:
    """What answers each of these endpoints, by the body of its response.

    Each raises ``RequestError``: a body is malformed, or the service refuses.
    """

    async def index(route: Route, receive: Receive) -> bytes:
        ready_only = http_bodies.parse_repository_index(await read_body(receive, MAX_BODY_NBYTES))
        return http_bodies.repository_index_body(service.repository_index(ready_only))

    async def load(route: Route, receive: Receive) -> bytes:
        await service.repository.load(
            route.model_name, load_parameters(await read_body(receive, MAX_BODY_NBYTES))
        )
        return b""

    async def unload(route: Route, receive: Receive) -> bytes:
        await service.repository.unload(
            route.model_name, _parameters(await read_body(receive, MAX_BODY_NBYTES))
        )
        return b""

    async def named(route: Route, receive: Receive) -> bytes:
        await read_body(receive, MAX_BODY_NBYTES)
        raise Unimplemented("'repository_name' specification is not supported")

    return {
        Endpoint.REPOSITORY_INDEX: index,
        Endpoint.REPOSITORY_LOAD: load,
        Endpoint.REPOSITORY_UNLOAD: unload,
        Endpoint.REPOSITORY_NAMED: named,
    }


def load_parameters(body: bytes) -> dict[str, Any]:
    """The parameters of a load request: "config" is a text, "file:…" are bytes, sent in base64.

    Raises:
        InvalidArgument: the body is malformed, or a value is of the wrong type.
        Internal: there is no such parameter.
    """
    return {key: _load_parameter(key, value) for key, value in _parameters(body).items()}


def _load_parameter(key: str, value: Any) -> str | bytes:
    is_file = key.startswith("file:")
    if key != "config" and not is_file:
        raise Internal("unexpected error on creating Triton parameter")
    if not isinstance(value, str):
        raise InvalidArgument("attempt to access JSON non-string as string")
    if not is_file:
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument("the content of a file in a load request must be a base64 string") from None


def _parameters(body: bytes) -> dict[str, Any]:
    """The member ``parameters``; an empty body has none."""
    document = loads(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a load or unload request must be a JSON object")
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument("'parameters' of a load or unload request must be a JSON object")
    return parameters
