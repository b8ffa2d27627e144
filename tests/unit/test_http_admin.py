"""The admin API without a server: paths, bodies, and how outcomes become answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http1_talk import Talk
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.settings.values import ADMIN
from gpuserve.core.errors import Code, InvalidArgument, RequestError, Unimplemented
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.protocols.access import endpoints as routes
from gpuserve.front.protocols.access.authorization import AccessPolicy
from gpuserve.front.protocols.access.endpoints import NOT_FOUND, Endpoint, Route, RouteError
from gpuserve.front.protocols.http.http_handler import HttpHandler
from gpuserve.front.protocols.http.management_endpoints import admin_command, outcome_answer
from gpuserve.front.service.control import AdminControl, SupervisorRequests
from gpuserve.front.service.inference_service import inference_service
from gpuserve.supervisor.control.operator_protocol import VerbOutcome

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
    assert routes.match_route(route.endpoint.method, path, {ADMIN}) == route
    for method in {"GET", "POST", "DELETE", "HEAD"} - {route.endpoint.method}:
        refusal = RouteError(405, "Method Not Allowed", route.endpoint.method)
        assert routes.match_route(method, path, {ADMIN}) == refusal


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
    assert routes.match_route("POST", path, {ADMIN}) is NOT_FOUND


def test_it_is_off_by_default_and_a_group_of_its_own() -> None:
    assert ServerSettings().admin_api is False
    assert {one for one in Endpoint if one.access.group == ADMIN} == {one.endpoint for one in PATHS.values()}


def status_of(method: str, path: bytes, *, admin: bool) -> int:
    """What somebody on another machine is told."""
    service = inference_service(ServerSettings(admin_api=admin))

    async def ask() -> int:
        handler = HttpHandler(service, AsyncRequests(), 1 << 20, AccessPolicy())
        talk = Talk(handler=handler.accept, client=("10.0.0.1", 1))
        return talk.feed(b"%b %b HTTP/1.1\r\nhost: x\r\n\r\n" % (method.encode(), path)).status

    return asyncio.run(ask())


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("path", PATHS)
def test_without_it_anybody_is_told_not_found(method: str, path: bytes) -> None:
    assert status_of(method, path, admin=False) == 404


@pytest.mark.parametrize("path", PATHS)
def test_with_it_no_other_machine_is_let_through(path: bytes) -> None:
    assert status_of(PATHS[path].endpoint.method, path, admin=True) == 403


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
    assert admin_command(route, body) == asked


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
        admin_command(route, body)
    assert text in str(error.value)
    assert len(str(error.value)) < 400


@given(st.sampled_from(sorted(PATHS)), st.binary(max_size=40) | st.just(b'{"instances":2}'))
def test_any_body_is_a_question_or_an_error_for_the_client(path: bytes, body: bytes) -> None:
    try:
        asked = admin_command(PATHS[path], body)
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
        (VerbOutcome("", "", {"unfinished": 0}), 200, {"unfinished": 0}),
        (VerbOutcome("", "model m is loaded already", {}), 200, {"text": "model m is loaded already"}),
        (VerbOutcome("NOT_FOUND", "no such model", {}), 404, {"error": "no such model"}),
        (VerbOutcome("UNAVAILABLE", "Server exiting", {}), 503, {"error": "Server exiting"}),
        (
            VerbOutcome("DEADLINE_EXCEEDED", "3 are left", {"unfinished": 3}),
            504,
            {"error": "3 are left", "unfinished": 3},
        ),
        (VerbOutcome("A NEW ONE", "what", {}), 500, {"error": "what"}),
    ],
)
def test_outcomes_become_answers(outcome: VerbOutcome, status: int, body: dict[str, Any]) -> None:
    head, given = outcome_answer(outcome)
    assert (head.status, json.loads(given)) == (status, body)
    assert (b"content-type", b"application/json") in head.headers


def test_answers_find_who_asked() -> None:
    asked: list[Any] = []
    questions = SupervisorRequests(asked.append)
    control = AdminControl(questions, is_open=True)

    async def run() -> list[VerbOutcome]:
        first = asyncio.create_task(control.ask("status", {}))
        second = asyncio.create_task(control.ask("load", {"model": "m"}))
        gone = asyncio.create_task(control.ask("reload", {}))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        for ticket, verb, _ in reversed(asked):
            questions.complete(ticket, VerbOutcome("", verb, {}))
        questions.complete(99, VerbOutcome("", "nobody", {}))
        questions.complete(asked[0][0], VerbOutcome("", "twice", {}))
        return [await first, await second]

    assert [one.text for one in asyncio.run(run())] == ["status", "load"]
    assert [one[1:] for one in asked] == [("status", {}), ("load", {"model": "m"}), ("reload", {})]


def test_without_it_nobody_is_asked() -> None:
    control = AdminControl(SupervisorRequests(lambda _: None), is_open=False)
    assert not control.is_open
    with pytest.raises(Unimplemented, match="the setting admin_api opens it"):
        asyncio.run(control.ask("status", {}))
