"""The HTTP endpoints of the admin API: a request to a verb and its arguments, and the outcome to an answer.
Part of the HTTP door; what the verbs do is the supervisor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import InvalidArgument, request_error
from gpuserve.front.doors.access.endpoints import Endpoint
from gpuserve.front.doors.access.routes import Route
from gpuserve.front.doors.http.answers import HttpAnswer, failure, json_answer
from gpuserve.front.doors.http.control import Awaiting
from gpuserve.front.exchange.awaited import AwaitedRequest
from gpuserve.front.requests.json_values import compact, loads
from gpuserve.front.requests.limits import shown, shown_names
from gpuserve.front.service.inference_service import InferenceService
from gpuserve.model.spec import MAX_INSTANCES
from gpuserve.supervisor.control.operator_protocol import MAX_TIMEOUT_S, VerbOutcome

#: A body has two members at most.
MAX_BODY_NBYTES: Final = 64 << 10


class OperatorQuestion(NamedTuple):
    """A verb that the supervisor is asked for, and its arguments by name."""

    verb: str
    arguments: dict[str, Any]


def admin_endpoints(service: InferenceService) -> dict[Endpoint, Awaiting]:
    """The coroutine that answers each endpoint of the admin API."""

    async def ask(route: Route, request: AwaitedRequest) -> HttpAnswer:
        reads = route.endpoint.method != "GET"
        body = await request.body(MAX_BODY_NBYTES, InvalidArgument) if reads else b""
        return answer_of(await service.control.admin.ask(*question(route, body)))

    return dict.fromkeys(_VERBS, ask)


def question(route: Route, body: bytes) -> OperatorQuestion:
    """The verb that a request stands for, with its arguments; InvalidArgument: the body fits no verb."""
    verb, members = _VERBS[route.endpoint]
    given = _given(body, verb, members)
    if not route.model_name:
        return OperatorQuestion(verb, given)
    if route.endpoint is Endpoint.ADMIN_MODEL_SCALE:
        if "instances" not in given:
            raise InvalidArgument("the body of a scale request must have the member 'instances'")
        return OperatorQuestion(verb, {"counts": {route.model_name: given["instances"]}})
    return OperatorQuestion(verb, {"model": route.model_name})


def answer_of(outcome: VerbOutcome) -> HttpAnswer:
    """The answer for an outcome: its result, with what there is to be said as "text" or as "error"."""
    if outcome.code:
        return failure(request_error(outcome.code, outcome.text), outcome.result)
    said = {"text": outcome.text} if outcome.text else {}
    return json_answer({**outcome.result, **said})


def _given(body: bytes, verb: str, members: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    document = loads(body) if body.strip() else {}
    if not isinstance(document, dict):
        raise InvalidArgument(f"the body of a {verb} request must be a JSON object")
    for name in document:
        if name not in members:
            known = f"expected {shown_names(members)}" if members else "it takes none"
            raise InvalidArgument(f"unknown member '{shown(name)}' in the body of a {verb} request; {known}")
    return {name: members[name](value) for name, value in document.items()}


def _timeout_s(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_TIMEOUT_S:
        raise _wrong("timeout_s", f"a number of seconds from 0 to {MAX_TIMEOUT_S:.0f}", value)
    return float(value)


def _undo(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("undo", "true or false", value)
    return value


def _instances(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_INSTANCES:
        raise _wrong("instances", f"an integer from 1 to {MAX_INSTANCES}", value)
    return value


def _wrong(member: str, expected: str, value: Any) -> InvalidArgument:
    return InvalidArgument(f"'{member}': expected {expected}, given {shown(compact(value))}")


#: The verb of each endpoint, and the members that its body may have.
_VERBS: Final[dict[Endpoint, tuple[str, dict[str, Callable[[Any], Any]]]]] = {
    Endpoint.ADMIN_STATUS: ("status", {}),
    Endpoint.ADMIN_DRAIN: ("drain", {"timeout_s": _timeout_s, "undo": _undo}),
    Endpoint.ADMIN_RELOAD: ("reload", {}),
    Endpoint.ADMIN_MODEL_LOAD: ("load", {}),
    Endpoint.ADMIN_MODEL_UNLOAD: ("unload", {}),
    Endpoint.ADMIN_MODEL_RELOAD: ("reload", {}),
    Endpoint.ADMIN_MODEL_SCALE: ("scale", {"instances": _instances}),
}
