"""The HTTP endpoints of what clients may look at and change while the server runs: the model repository, the
regions of shared memory, the settings of tracing and of the log. Part of the HTTP door.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from gpuserve.core.errors import InvalidArgument, Unimplemented
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.offload import read_off_loop
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.access.users import user_of
from gpuserve.front.doors.http.answers import HttpAnswer, json_answer
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.ipc.shared_memory import HANDLE_NBYTES, RegionKind
from gpuserve.front.requests import admin_codec
from gpuserve.front.requests.inference import IndexEntry
from gpuserve.front.requests.json_values import described, is_too_deep, loads, typed, unsigned
from gpuserve.front.requests.limits import shown
from gpuserve.front.service.inference_service import InferenceService

#: The largest of these bodies is a config override, some kilobytes.
_REPOSITORY_NBYTES: Final = 4 << 20
_SETTINGS_NBYTES: Final = 1 << 20
_REGION_NBYTES: Final = 1 << 16
_NOT_BOOLEAN: Final = "Invalid value for 'ready': expected a boolean"

T = TypeVar("T")
#: Answers a request of a route at once, whatever its body says. Raises ``RequestError``.
Immediate: TypeAlias = Callable[[Route], HttpAnswer]
#: Answers a request of a route after waiting for its body or more. Raises ``RequestError``. None: it has sent
#: the response itself.
Awaiting: TypeAlias = Callable[[Route, AwaitedRequest], Awaitable[HttpAnswer | None]]


class ControlEndpoints:
    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self.immediate: dict[Endpoint, Immediate] = {
            Endpoint.TRACE_SETTING: self._trace_setting,
            Endpoint.LOGGING: lambda _: json_answer(admin_codec.log_json(service.control.log.settings)),
            Endpoint.SYSTEM_REGION_STATUS: self._system_status,
            Endpoint.SYSTEM_REGION_UNREGISTER: partial(self._unregister, RegionKind.SYSTEM),
            Endpoint.CUDA_REGION_STATUS: self._cuda_status,
            Endpoint.CUDA_REGION_UNREGISTER: partial(self._unregister, RegionKind.CUDA),
        }
        self.awaiting: dict[Endpoint, Awaiting] = {
            Endpoint.REPOSITORY_INDEX: _reading(_REPOSITORY_NBYTES, self._index),
            Endpoint.REPOSITORY_LOAD: _reading(_REPOSITORY_NBYTES, self._load),
            Endpoint.REPOSITORY_UNLOAD: _reading(_REPOSITORY_NBYTES, self._unload),
            Endpoint.REPOSITORY_NAMED: _reading(_REPOSITORY_NBYTES, self._named),
            Endpoint.SYSTEM_REGION_REGISTER: self._system_register,
            Endpoint.CUDA_REGION_REGISTER: _reading(_REGION_NBYTES, self._cuda_register),
            Endpoint.TRACE_UPDATE: self._trace_update,
            Endpoint.LOGGING_UPDATE: _reading(_SETTINGS_NBYTES, self._logging_update),
        }

    # ---- repository -----------------------------------------------------------------------

    async def _index(self, route: Route, body: bytes) -> Any:
        entries = self._service.models.index(ready_only=await self._read(body, asks_for_ready_only))
        return [_index_row(one) for one in entries]

    async def _load(self, route: Route, body: bytes) -> Any:
        await self._service.control.repository.load(route.model_name, await self._read(body, load_parameters))
        return b""

    async def _unload(self, route: Route, body: bytes) -> Any:
        await self._service.control.repository.unload(route.model_name, await self._read(body, _parameters))
        return b""

    async def _named(self, route: Route, body: bytes) -> Any:
        raise Unimplemented("'repository_name' specification is not supported")

    # ---- regions --------------------------------------------------------------------------

    def _system_status(self, route: Route) -> HttpAnswer:
        found = self._service.control.regions.status(RegionKind.SYSTEM, route.region_name)
        return json_answer(
            [
                {"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.nbytes}
                for one in found
            ]
        )

    def _cuda_status(self, route: Route) -> HttpAnswer:
        found = self._service.control.regions.status(RegionKind.CUDA, route.region_name)
        return json_answer(
            [{"name": one.name, "device_id": one.device_id, "byte_size": one.nbytes} for one in found]
        )

    def _unregister(self, kind: RegionKind, route: Route) -> HttpAnswer:
        self._service.control.regions.unregister(kind, route.region_name)
        return json_answer(b"")

    async def _system_register(self, route: Route, request: AwaitedRequest) -> HttpAnswer:
        given = typed(loads(await request.body(_REGION_NBYTES, InvalidArgument)), dict, "the request")
        key = typed(_field(given, "key"), str, "'key'")
        offset = unsigned(given.get("offset", 0), "'offset'")
        nbytes = unsigned(_field(given, "byte_size"), "'byte_size'")
        client = user_of(request.exchange)
        self._service.control.regions.register_system(route.region_name, key, offset, nbytes, client)
        return json_answer(b"")

    async def _cuda_register(self, route: Route, body: bytes) -> Any:
        given = typed(loads(body), dict, "the request")
        handle = read_handle(_field(given, "raw_handle"))
        device_id = unsigned(_field(given, "device_id"), "'device_id'")
        nbytes = unsigned(_field(given, "byte_size"), "'byte_size'")
        await self._service.control.regions.register_cuda(route.region_name, handle, device_id, nbytes)
        return b""

    # ---- settings -------------------------------------------------------------------------

    def _trace_setting(self, route: Route) -> HttpAnswer:
        return json_answer(admin_codec.trace_json(self._service.control.trace.settings(route.model_name)))

    async def _trace_update(self, route: Route, request: AwaitedRequest) -> HttpAnswer:
        trace = self._service.control.trace
        trace.settings(route.model_name)  # an unknown model comes before a wrong body
        body = await request.body(_SETTINGS_NBYTES, InvalidArgument)
        changes = await self._read(body, admin_codec.parse_trace_json)
        return json_answer(admin_codec.trace_json(trace.update(route.model_name, changes)))

    async def _logging_update(self, route: Route, body: bytes) -> Any:
        changes = await self._read(body, admin_codec.parse_log_json)
        return admin_codec.log_json(self._service.control.log.update(changes))

    async def _read(self, body: bytes, read: Callable[[bytes], T]) -> T:
        return await read_off_loop(self._service.json_executor, body, read)


def _reading(max_nbytes: int, answer: Callable[[Route, bytes], Awaitable[Any]]) -> Awaiting:
    """The endpoint that answers a body with the document of ``answer``."""

    async def read(route: Route, request: AwaitedRequest) -> HttpAnswer:
        return json_answer(await answer(route, await request.body(max_nbytes, InvalidArgument)))

    return read


def _index_row(entry: IndexEntry) -> dict[str, str]:
    """One version in the index, with a ``reason`` wherever there is a state: MLServer's client requires it,
    though Triton leaves an empty one out.
    """
    said = {key: value for key, value in entry._asdict().items() if value}
    return said | {"reason": entry.reason} if entry.state else said


# ---- bodies -------------------------------------------------------------------------------


def asks_for_ready_only(body: bytes) -> bool:
    """Whether an index request asks only for ready models; InvalidArgument: malformed, however deep."""
    if not body.strip():
        return False
    if is_too_deep(body):  # "ready" is the only member there is, so that is what nests
        raise InvalidArgument(_NOT_BOOLEAN)
    document = loads(body)
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a repository index request must be a JSON object")
    ready = document.get("ready", False)
    if not isinstance(ready, bool | None):  # clients that write all their fields leave it null
        raise InvalidArgument(_NOT_BOOLEAN)
    return bool(ready)


def load_parameters(body: bytes) -> dict[str, Any]:
    """The parameters of a load request: "config" is text, "file:…" bytes sent in base64; InvalidArgument:
    malformed, or there is no such parameter.
    """
    return {key: _load_parameter(key, value) for key, value in _parameters(body).items()}


def _load_parameter(key: str, value: Any) -> str | bytes:
    is_file = key.startswith("file:")
    if key != "config" and not is_file:
        raise InvalidArgument(f"unknown load parameter '{shown(key)}', expected 'config'")
    if not isinstance(value, str):
        raise InvalidArgument(f"parameter '{shown(key)}': expected a string, got {described(value)}")
    if not is_file:
        return value
    if (content := _base64(value)) is None:
        raise InvalidArgument("the content of a file in a load request must be a base64 string")
    return content


def _base64(text: str) -> bytes | None:
    """What a text stands for; None where it is no base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _parameters(body: bytes) -> dict[str, Any]:
    """The member ``parameters`` of a load or unload request; an empty body has none."""
    document = loads(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a load or unload request must be a JSON object")
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument("'parameters' of a load or unload request must be a JSON object")
    return parameters


def read_handle(raw: Any) -> bytes:
    """The ``cudaIpcMemHandle_t`` in ``{"b64": "…"}``, ``HANDLE_NBYTES`` long; InvalidArgument: it is none."""
    text = typed(_field(typed(raw, dict, "'raw_handle'"), "b64"), str, "'b64' of 'raw_handle'")
    handle = _base64(text) or b""
    if len(handle) != HANDLE_NBYTES:
        raise InvalidArgument(
            "failed to register CUDA shared memory region: 'raw_handle' must be a valid base64 encoded "
            f"cudaIpcMemHandle_t, which has {HANDLE_NBYTES} bytes, got {len(handle)}"
        )
    return handle


def _field(document: dict[str, Any], name: str) -> Any:
    if name not in document:
        raise InvalidArgument(f"Shared memory register request has no '{name}' field")
    return document[name]
