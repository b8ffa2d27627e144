"""The admin API without a server: paths, bodies, and how outcomes become answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator

from gpuserve.access import ADMIN
from gpuserve.errors import Code, InvalidArgument, RequestError, Unimplemented
from gpuserve.front.admin_control import AdminControl
from gpuserve.front.endpoint import routes
from gpuserve.front.endpoint.guards import HttpGuard
from gpuserve.front.endpoint.http_admin import answer_of, question
from gpuserve.front.endpoint.openapi import Description
from gpuserve.front.endpoint.openapi_admin import ADMIN_OPERATIONS, ADMIN_SCHEMAS
from gpuserve.front.endpoint.openapi_schemas import SCHEMAS
from gpuserve.front.endpoint.restrictions import ENDPOINTS, Policy
from gpuserve.front.endpoint.routes import NOT_FOUND, Endpoint, Refusal, Route
from gpuserve.settings import ServerSettings
from gpuserve.supervisor.operator.outcome import Outcome

SCALE = Route(Endpoint.ADMIN_MODEL_SCALE, "m")
DRAIN = Route(Endpoint.ADMIN_DRAIN)
PATHS = {
    b"/v2/admin/status": Route(Endpoint.ADMIN_STATUS),
    b"/v2/admin/drain": DRAIN,
    b"/v2/admin/reload": Route(Endpoint.ADMIN_RELOAD),
    b"/v2/admin/models/m/load": Route(Endpoint.ADMIN_MODEL_LOAD, "m"),
    b"/v2/admin/models/m/unload": Route(Endpoint.ADMIN_MODEL_UNLOAD, "m"),
    b"/v2/admin/models/m/reload": Route(Endpoint.ADMIN_MODEL_RELOAD, "m"),
    b"/v2/admin/models/m/scale": SCALE,
    b"/v2/admin/models/m/scale?x=1": SCALE,
    b"/v2/admin/models/a%2Fb/scale": Route(Endpoint.ADMIN_MODEL_SCALE, "a/b"),
    b"/v2/admin/models/models/load": Route(Endpoint.ADMIN_MODEL_LOAD, "models"),
}


# ---- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_paths(path: bytes) -> None:
    route = PATHS[path]
    assert routes.match(route.endpoint.method, path, admin=True) == route
    for method in {"GET", "POST", "DELETE", "HEAD"} - {route.endpoint.method}:
        refusal = Refusal(405, "Method Not Allowed", route.endpoint.method)
        assert routes.match(method, path, admin=True) == refusal


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_without_the_setting_no_path_exists(path: bytes, method: str) -> None:
    assert routes.match(method, path) is NOT_FOUND


@pytest.mark.parametrize(
    "path",
    [
        b"/v2/admin", b"/v2/admin/", b"/v2/admin/status/", b"/v2/admin/scale", b"/v2/admin/load",
        b"/v2/admin/models", b"/v2/admin/models/m", b"/v2/admin/models/m/", b"/v2/admin/models//load",
        b"/v2/admin/models/m/drain", b"/v2/admin/models/m/load/", b"/v2/admin/models/m/versions/1/load",
        b"/v2/admin/%73tatus", b"/V2/admin/status",
    ],
)  # fmt: skip
def test_paths_that_do_not_exist(path: bytes) -> None:
    assert routes.match("POST", path, admin=True) is NOT_FOUND


def test_it_is_off_by_default_and_a_group_of_its_own() -> None:
    assert ServerSettings().admin_api is False
    assert {one for one, access in ENDPOINTS.items() if access.group == ADMIN} == set(ADMIN_OPERATIONS)


def guarded(method: str, path: str, *, admin: bool) -> list[Route | Refusal]:
    """What the door behind the guard is asked for."""
    asked: list[Route | Refusal] = []

    class Door:
        async def serve(self, route: Route | Refusal, *_: Any) -> None:
            asked.append(route)

    async def nothing(*_: Any) -> Any:
        return {}

    scope = {"type": "http", "method": method, "path": path, "headers": [], "client": ("10.0.0.1", 1)}
    asyncio.run(_awaited(HttpGuard(Door(), Policy(), admin=admin)(scope, nothing, nothing)))
    return asked


async def _awaited(coroutine: Any) -> None:
    await coroutine


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("path", PATHS)
def test_a_guard_without_it_says_not_found_to_anybody(method: str, path: bytes) -> None:
    assert guarded(method, path.decode().partition("?")[0], admin=False) == [NOT_FOUND]


@pytest.mark.parametrize("path", PATHS)
def test_a_guard_with_it_lets_no_other_machine_through(path: bytes) -> None:
    assert guarded(PATHS[path].endpoint.method, path.decode().partition("?")[0], admin=True) == []


# ---- questions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "body", "asked"),
    [
        (Route(Endpoint.ADMIN_STATUS), b"", ("status", {})),
        (Route(Endpoint.ADMIN_RELOAD), b"", ("reload", {})),
        (Route(Endpoint.ADMIN_RELOAD), b" {} ", ("reload", {})),
        (Route(Endpoint.ADMIN_MODEL_RELOAD, "m"), b"{}", ("reload", {"model": "m"})),
        (Route(Endpoint.ADMIN_MODEL_LOAD, "a/b"), b"", ("load", {"model": "a/b"})),
        (Route(Endpoint.ADMIN_MODEL_UNLOAD, "m"), b"\n", ("unload", {"model": "m"})),
        (DRAIN, b"", ("drain", {})),
        (DRAIN, b'{"timeout_s":0}', ("drain", {"timeout_s": 0.0})),
        (DRAIN, b'{"timeout_s":1.5,"undo":false}', ("drain", {"timeout_s": 1.5, "undo": False})),
        (SCALE, b'{"instances":3}', ("scale", {"counts": {"m": 3}})),
    ],
)
def test_questions(route: Route, body: bytes, asked: tuple[str, dict[str, Any]]) -> None:
    assert question(route, body) == asked


@pytest.mark.parametrize(
    ("route", "body", "text"),
    [
        (DRAIN, b"{", "failed to parse the request JSON buffer"),
        (DRAIN, b"\xff", "failed to parse the request JSON buffer"),
        (DRAIN, b"[" * 5000, "nesting depth"),
        (DRAIN, b"[]", "the body of a drain request must be a JSON object"),
        (DRAIN, b"null", "the body of a drain request must be a JSON object"),
        (DRAIN, b'{"timeout":1}', "unknown member 'timeout' in the body of a drain request; expected"),
        (DRAIN, b'{"timeout_s":-1}', "'timeout_s': expected a number of seconds from 0 to 86400, given -1"),
        (DRAIN, b'{"timeout_s":1e400}', "'timeout_s': expected"),
        (DRAIN, b'{"timeout_s":NaN}', "'timeout_s': expected"),
        (DRAIN, b'{"timeout_s":true}', "expected a number of seconds from 0 to 86400, given true"),
        (DRAIN, b'{"timeout_s":"5"}', "'timeout_s': expected"),
        (DRAIN, b'{"timeout_s":null}', "'timeout_s': expected"),
        (DRAIN, b'{"undo":1}', "'undo': expected true or false, given 1"),
        (DRAIN, b'{"undo":true,"undo":true}', "undo"),
        (SCALE, b"", "the body of a scale request must have the member 'instances'"),
        (SCALE, b"{}", "the body of a scale request must have the member 'instances'"),
        (SCALE, b'{"instances":0}', "'instances': expected an integer from 1 to 256, given 0"),
        (SCALE, b'{"instances":-3}', "'instances': expected"),
        (SCALE, b'{"instances":2.0}', "'instances': expected an integer from 1 to 256, given 2.0"),
        (SCALE, b'{"instances":true}', "'instances': expected"),
        (SCALE, b'{"instances":"2"}', "'instances': expected"),
        (SCALE, b'{"instances":' + b"9" * 4000 + b"}", "'instances': expected"),
        (SCALE, b'{"instances":{"cpu":2}}', "given {\"cpu\":2}"),
        (SCALE, b'{"counts":{"other":2}}', "unknown member 'counts' in the body of a scale request"),
        (Route(Endpoint.ADMIN_RELOAD), b'{"model":"m"}', "unknown member 'model' in the body of a reload"),
        (Route(Endpoint.ADMIN_MODEL_LOAD, "m"), b'{"parameters":{}}', "it takes none"),
    ],
)  # fmt: skip
def test_bodies_that_cannot_be(route: Route, body: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        question(route, body)
    assert text in str(error.value)
    assert len(str(error.value)) < 400


@given(st.sampled_from(sorted(PATHS)), st.binary(max_size=40) | st.just(b'{"instances":2}'))
def test_any_body_is_a_question_or_an_error_for_the_client(path: bytes, body: bytes) -> None:
    try:
        asked = question(PATHS[path], body)
    except RequestError as error:
        refused: RequestError | None = error
    else:
        refused = None
        assert asked.verb in {"status", "drain", "reload", "load", "unload", "scale"}
    assert refused is None or refused.code is Code.INVALID_ARGUMENT


# ---- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "status", "body"),
    [
        (Outcome("", "", {"unfinished": 0}), 200, {"unfinished": 0}),
        (Outcome("", "model m is loaded already", {}), 200, {"text": "model m is loaded already"}),
        (Outcome("NOT_FOUND", "no such model", {}), 404, {"error": "no such model"}),
        (Outcome("UNAVAILABLE", "Server exiting", {}), 503, {"error": "Server exiting"}),
        (
            Outcome("DEADLINE_EXCEEDED", "3 are left", {"unfinished": 3}),
            504,
            {"error": "3 are left", "unfinished": 3},
        ),
        (Outcome("A NEW ONE", "what", {}), 500, {"error": "what"}),
    ],
)
def test_outcomes_become_answers(outcome: Outcome, status: int, body: dict[str, Any]) -> None:
    given_status, headers, given_body = answer_of(outcome)
    assert (given_status, json.loads(given_body)) == (status, body)
    assert (b"content-type", b"application/json") in headers


def test_answers_find_who_asked() -> None:
    asked: list[tuple[int, str, dict[str, Any]]] = []
    control = AdminControl(lambda *question: asked.append(question))

    async def run() -> list[Outcome]:
        first = asyncio.create_task(control.ask("status", {}))
        second = asyncio.create_task(control.ask("load", {"model": "m"}))
        gone = asyncio.create_task(control.ask("reload", {}))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        for ticket, verb, _ in reversed(asked):
            control.answered(ticket, Outcome("", verb, {}))
        control.answered(99, Outcome("", "nobody", {}))
        control.answered(asked[0][0], Outcome("", "twice", {}))
        return [await first, await second]

    assert [one.text for one in asyncio.run(run())] == ["status", "load"]
    assert [one[1:] for one in asked] == [("status", {}), ("load", {"model": "m"}), ("reload", {})]


def test_without_it_nobody_is_asked() -> None:
    control = AdminControl()
    assert not control.is_open
    with pytest.raises(Unimplemented, match="the setting admin_api opens it"):
        asyncio.run(control.ask("status", {}))


# ---- the description ----------------------------------------------------------------------------


def test_it_is_described_only_where_it_is() -> None:
    without = json.loads(Description("s", "1").body([]))
    described = json.loads(Description("s", "1", admin=True).body([]))
    OpenAPIV31SpecValidator(described).validate()
    assert not any("admin" in path for path in without["paths"])
    assert without["components"]["schemas"].keys() == SCHEMAS.keys()
    for endpoint, operation in ADMIN_OPERATIONS.items():
        (path,) = operation.paths
        assert endpoint.method.lower() in described["paths"][path]
        route = routes.match(endpoint.method, path.format(model_name="m").encode(), admin=True)
        assert isinstance(route, Route)
        assert route.endpoint is endpoint


def test_schemas_that_a_row_names_exist_and_no_others() -> None:
    named = {name for row in ADMIN_OPERATIONS.values() for name in (row.body, row.answer) if name}
    assert named == set(ADMIN_SCHEMAS)
    assert not set(ADMIN_SCHEMAS) & set(SCHEMAS)
