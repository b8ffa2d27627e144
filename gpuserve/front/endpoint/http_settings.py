"""The HTTP endpoints of what clients may change while the server runs: trace and log settings. Part of the
HTTP door.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from gpuserve.front.endpoint import log_codec, trace_codec
from gpuserve.front.endpoint.asgi import Receive
from gpuserve.front.endpoint.request_body import read_body
from gpuserve.front.endpoint.routes import Endpoint, Route
from gpuserve.front.endpoint.service import InferenceService

#: Some names and values.
MAX_BODY_NBYTES: Final = 1 << 20


def settings_endpoints(
    service: InferenceService,
) -> dict[Endpoint, Callable[[Route, Receive], Awaitable[bytes]]]:
    """What answers each of these endpoints: the JSON of all settings.

    Each raises ``RequestError``: the model does not exist, or a value cannot be.
    """

    async def trace_setting(route: Route, receive: Receive) -> bytes:
        return trace_codec.json_body(service.trace.settings(route.model_name))

    async def trace_update(route: Route, receive: Receive) -> bytes:
        service.trace.settings(route.model_name)  # an unknown model comes before a wrong body
        changes = trace_codec.parse_json(await read_body(receive, MAX_BODY_NBYTES))
        return trace_codec.json_body(service.trace.update(route.model_name, changes))

    async def logging(route: Route, receive: Receive) -> bytes:
        return log_codec.json_body(service.log.settings)

    async def logging_update(route: Route, receive: Receive) -> bytes:
        changes = log_codec.parse_json(await read_body(receive, MAX_BODY_NBYTES))
        return log_codec.json_body(service.log.update(changes))

    return {
        Endpoint.TRACE_SETTING: trace_setting,
        Endpoint.TRACE_UPDATE: trace_update,
        Endpoint.LOGGING: logging,
        Endpoint.LOGGING_UPDATE: logging_update,
    }
