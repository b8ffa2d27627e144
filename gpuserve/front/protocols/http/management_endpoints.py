"""HTTP endpoints of management: repository, shared-memory regions, settings, and the admin API."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from gpuserve.core.errors import InvalidArgument, Unimplemented, request_error
from gpuserve.front.ipc.shared_memory import HANDLE_NBYTES, RegionKind
from gpuserve.front.net.async_requests import AsyncRequest
from gpuserve.front.protocols.access.authorization import client_uid
from gpuserve.front.protocols.access.body_decoding import read_off_loop
from gpuserve.front.protocols.access.endpoints import Endpoint, Route
from gpuserve.front.protocols.http import http_responses as responses
from gpuserve.front.protocols.http.http_responses import AsyncEndpoint, HttpAnswer, json_answer
from gpuserve.front.requests import admin_codec
from gpuserve.front.requests.json_values import compact, is_too_deep, loads, typed, unsigned
from gpuserve.front.requests.limits import shown, shown_names
from gpuserve.front.service.inference_service import InferenceService
from gpuserve.model.spec import MAX_INSTANCES
from gpuserve.supervisor.control.operator_protocol import MAX_TIMEOUT_S, VerbOutcome

#: The largest repository body is a config override, some kilobytes.
_REPOSITORY_NBYTES: Final = 4 << 20
_SETTINGS_NBYTES: Final = 1 << 20
_REGION_NBYTES: Final = 1 << 16
_NOT_BOOLEAN: Final = "Invalid value for 'ready': expected a boolean"

T = TypeVar("T")


class ManagementEndpoints:
    """The endpoints of the v2 protocol that show or change the repository, regions, and settings."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self.immediate: dict[Endpoint, responses.ImmediateEndpoint] = {
            Endpoint.TRACE_SETTING: lambda route: json_answer(
                admin_codec.trace_json(service.control.trace.settings(route.model_name))
            ),
            Endpoint.LOGGING: lambda _: json_answer(admin_codec.log_json(service.control.log.settings)),
            Endpoint.SYSTEM_REGION_STATUS: partial(self._region_status, RegionKind.SYSTEM),
            Endpoint.SYSTEM_REGION_UNREGISTER: partial(self._unregister, RegionKind.SYSTEM),
            Endpoint.CUDA_REGION_STATUS: partial(self._region_status, RegionKind.CUDA),
            Endpoint.CUDA_REGION_UNREGISTER: partial(self._unregister, RegionKind.CUDA),
        }
        self.awaiting: dict[Endpoint, AsyncEndpoint] = {
            Endpoint.REPOSITORY_INDEX: _with_body(_REPOSITORY_NBYTES, self._index),
            Endpoint.REPOSITORY_LOAD: _with_body(_REPOSITORY_NBYTES, self._load),
            Endpoint.REPOSITORY_UNLOAD: _with_body(_REPOSITORY_NBYTES, self._unload),
            Endpoint.REPOSITORY_NAMED: _with_body(_REPOSITORY_NBYTES, self._named),
            Endpoint.SYSTEM_REGION_REGISTER: self._system_register,
            Endpoint.CUDA_REGION_REGISTER: _with_body(_REGION_NBYTES, self._cuda_register),
            Endpoint.TRACE_UPDATE: self._trace_update,
            Endpoint.LOGGING_UPDATE: _with_body(_SETTINGS_NBYTES, self._logging_update),
        }

    # ---- repository -----------------------------------------------------------------------

    async def _index(self, route: Route, body: bytes) -> Any:
        rows = []
        for entry in self._service.models.index(ready_only=await self._read(body, parse_index_body)):
            row = {key: value for key, value in entry._asdict().items() if value}
            # MLServer's client requires the reason of a state, though Triton leaves an empty one out.
            rows.append(row | {"reason": entry.reason} if entry.state else row)
        return rows

    async def _load(self, route: Route, body: bytes) -> Any:
        given = await self._read(body, _parse_parameters)
        # Triton's JSON gives a file as text; the rules of a load speak of bytes, and no file is taken.
        parameters = {
            key: value.encode() if key.startswith("file:") and isinstance(value, str) else value
            for key, value in given.items()
        }
        await self._service.control.repository.load(route.model_name, parameters)
        return b""

    async def _unload(self, route: Route, body: bytes) -> Any:
        parameters = await self._read(body, _parse_parameters)
        await self._service.control.repository.unload(route.model_name, parameters)
        return b""

    async def _named(self, route: Route, body: bytes) -> Any:
        raise Unimplemented("'repository_name' specification is not supported")

    # ---- regions --------------------------------------------------------------------------

    def _region_status(self, kind: RegionKind, route: Route) -> HttpAnswer:
        found = self._service.control.regions.status(kind, route.region_name)
        return json_answer([one.members(kind) for one in found])

    def _unregister(self, kind: RegionKind, route: Route) -> HttpAnswer:
        self._service.control.regions.unregister(kind, route.region_name)
        return json_answer(b"")

    async def _system_register(self, route: Route, request: AsyncRequest) -> HttpAnswer:
        given = typed(loads(await request.body(_REGION_NBYTES, InvalidArgument)), dict, "the request")
        key = typed(_field(given, "key"), str, "'key'")
        offset = unsigned(given.get("offset", 0), "'offset'")
        nbytes = unsigned(_field(given, "byte_size"), "'byte_size'")
        client = client_uid(request.exchange)
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

    async def _trace_update(self, route: Route, request: AsyncRequest) -> HttpAnswer:
        trace = self._service.control.trace
        trace.settings(route.model_name)  # an unknown model is reported before an invalid body
        body = await request.body(_SETTINGS_NBYTES, InvalidArgument)
        changes = await self._read(body, admin_codec.parse_trace_json)
        return json_answer(admin_codec.trace_json(trace.update(route.model_name, changes)))

    async def _logging_update(self, route: Route, body: bytes) -> Any:
        changes = await self._read(body, admin_codec.parse_log_json)
        return admin_codec.log_json(self._service.control.log.update(changes))

    async def _read(self, body: bytes, read: Callable[[bytes], T]) -> T:
        return await read_off_loop(self._service.json_executor, body, read)


def _with_body(max_nbytes: int, answer: Callable[[Route, bytes], Awaitable[Any]]) -> AsyncEndpoint:
    """Return an endpoint that reads a body and answers with the document that ``answer`` returns."""

    async def read(route: Route, request: AsyncRequest) -> HttpAnswer:
        return json_answer(await answer(route, await request.body(max_nbytes, InvalidArgument)))

    return read


# ---- bodies -------------------------------------------------------------------------------


def parse_index_body(body: bytes) -> bool:
    """Return whether an index request wants only ready models. Raise InvalidArgument if it is malformed."""
    if not body.strip():
        return False
    if is_too_deep(body):  # "ready" is the only known member, so its value is what nests
        raise InvalidArgument(_NOT_BOOLEAN)
    document = loads(body)
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a repository index request must be a JSON object")
    ready = document.get("ready", False)
    if not isinstance(ready, bool | None):  # clients that send all fields send null
        raise InvalidArgument(_NOT_BOOLEAN)
    return bool(ready)


def _parse_parameters(body: bytes) -> dict[str, Any]:
    """Return the member ``parameters`` of a load or unload request; an empty body has none."""
    document = loads(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise InvalidArgument("the body of a load or unload request must be a JSON object")
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument("'parameters' of a load or unload request must be a JSON object")
    return parameters


def read_handle(raw: Any) -> bytes:
    """Return the ``cudaIpcMemHandle_t`` in ``{"b64": "…"}``. Raise InvalidArgument for another length."""
    text = typed(_field(typed(raw, dict, "'raw_handle'"), "b64"), str, "'b64' of 'raw_handle'")
    try:
        handle = base64.b64decode(text, validate=True)
    except ValueError:
        handle = b""
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


# ---- admin API -----------------------------------------------------------------------------------

#: The limit of a body, which has at most two members.
MAX_BODY_NBYTES: Final = 64 << 10


class AdminCommand(NamedTuple):
    """A verb for the supervisor and its arguments by name."""

    verb: str
    arguments: dict[str, Any]


def admin_endpoints(service: InferenceService) -> dict[Endpoint, AsyncEndpoint]:
    """Return the endpoint functions of the admin API."""

    async def ask(route: Route, request: AsyncRequest) -> HttpAnswer:
        reads = route.endpoint.method != "GET"
        body = await request.body(MAX_BODY_NBYTES, InvalidArgument) if reads else b""
        return outcome_answer(await service.control.admin.ask(*admin_command(route, body)))

    return dict.fromkeys(_VERBS, ask)


def admin_command(route: Route, body: bytes) -> AdminCommand:
    """Return the verb and arguments of a request. Raise InvalidArgument if the body does not fit the verb."""
    verb, members = _VERBS[route.endpoint]
    given = _parse_members(body, verb, members)
    if not route.model_name:
        return AdminCommand(verb, given)
    if route.endpoint is Endpoint.ADMIN_MODEL_SCALE:
        if "instances" not in given:
            raise InvalidArgument("the body of a scale request must have the member 'instances'")
        return AdminCommand(verb, {"counts": {route.model_name: given["instances"]}})
    return AdminCommand(verb, {"model": route.model_name})


def outcome_answer(outcome: VerbOutcome) -> HttpAnswer:
    """Return the answer for an outcome: its result, with a text as "text" or "error"."""
    if outcome.code:
        return responses.error_answer(request_error(outcome.code, outcome.text), outcome.result)
    text = {"text": outcome.text} if outcome.text else {}
    return json_answer({**outcome.result, **text})


def _parse_members(body: bytes, verb: str, members: Mapping[str, _Member]) -> dict[str, Any]:
    document = loads(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise InvalidArgument(f"the body of a {verb} request must be a JSON object")
    for name, value in document.items():
        if name not in members:
            known = f"expected {shown_names(members)}" if members else "it takes none"
            raise InvalidArgument(f"unknown member '{shown(name)}' in the body of a {verb} request; {known}")
        expected, types, least, most = members[name]
        if type(value) not in types or not least <= value <= most:
            raise InvalidArgument(f"'{name}': expected {expected}, given {shown(compact(value))}")
    return document


#: A member of a body: a text about its values, their types, the least and the largest.
_Member: TypeAlias = tuple[str, tuple[type, ...], float, float]
_TIMEOUT: Final = f"a number of seconds from 0 to {MAX_TIMEOUT_S:.0f}"
_COUNT: Final = f"an integer from 1 to {MAX_INSTANCES}"
#: The verb of each endpoint, and the allowed members of its body.
_VERBS: Final[dict[Endpoint, tuple[str, dict[str, _Member]]]] = {
    Endpoint.ADMIN_STATUS: ("status", {}),
    Endpoint.ADMIN_DRAIN: (
        "drain",
        {
            "timeout_s": (_TIMEOUT, (int, float), 0, MAX_TIMEOUT_S),
            "undo": ("true or false", (bool,), False, True),
        },
    ),
    Endpoint.ADMIN_RELOAD: ("reload", {}),
    Endpoint.ADMIN_MODEL_LOAD: ("load", {}),
    Endpoint.ADMIN_MODEL_UNLOAD: ("unload", {}),
    Endpoint.ADMIN_MODEL_RELOAD: ("reload", {}),
    Endpoint.ADMIN_MODEL_SCALE: ("scale", {"instances": (_COUNT, (int,), 1, MAX_INSTANCES)}),
}
