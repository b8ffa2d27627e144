"""Paths and methods to endpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.protocols.access.endpoints import NOT_FOUND, Endpoint, Route, RouteError, match_route


@pytest.mark.parametrize(
    ("path", "route"),
    [
        (b"/v2", Route(Endpoint.SERVER_METADATA)),
        (b"/v2/", Route(Endpoint.SERVER_METADATA)),
        (b"/v2?x=1", Route(Endpoint.SERVER_METADATA)),
        (b"/v2/health/live", Route(Endpoint.SERVER_LIVE)),
        (b"/v2/health/ready", Route(Endpoint.SERVER_READY)),
        (b"/v2/repository/index", Route(Endpoint.REPOSITORY_INDEX)),
        (b"/v2/systemsharedmemory/status", Route(Endpoint.SYSTEM_REGION_STATUS)),
        (b"/v2/systemsharedmemory/region/a/status", Route(Endpoint.SYSTEM_REGION_STATUS, region_name="a")),
        (b"/v2/cudasharedmemory/unregister", Route(Endpoint.CUDA_REGION_UNREGISTER)),
        (b"/v2/cudasharedmemory/region/a%2Fb/status", Route(Endpoint.CUDA_REGION_STATUS, region_name="a/b")),
        (b"/metrics", Route(Endpoint.METRICS)),
        (b"/v2/logging", Route(Endpoint.LOGGING)),
        (b"/v2/trace/setting", Route(Endpoint.TRACE_SETTING)),
        (b"/v2/models/m/trace/setting", Route(Endpoint.TRACE_SETTING, "m")),
        (b"/v2/models", Route(Endpoint.MODELS)),
        (b"/v2/models/", Route(Endpoint.MODELS)),
        (b"/v2/models/m", Route(Endpoint.MODEL_METADATA, "m")),
        (b"/v2/models/m/ready", Route(Endpoint.MODEL_READY, "m")),
        (b"/v2/models/m/config", Route(Endpoint.MODEL_CONFIG, "m")),
        (b"/v2/models/m/stats", Route(Endpoint.MODEL_STATISTICS, "m")),
        (b"/v2/models/m/versions/3/stats", Route(Endpoint.MODEL_STATISTICS, "m", "3")),
        (b"/v2/models/stats", Route(Endpoint.MODEL_STATISTICS)),
        (b"/v2/models/stats?x=1", Route(Endpoint.MODEL_STATISTICS)),
        (b"/v2/models/stats/infer", Route(Endpoint.MODEL_INFER, "stats")),
        (b"/v2/models/m/infer", Route(Endpoint.MODEL_INFER, "m")),
        (b"/v2/models/m/versions/3", Route(Endpoint.MODEL_METADATA, "m", "3")),
        (b"/v2/models/m/versions/3/ready", Route(Endpoint.MODEL_READY, "m", "3")),
        (b"/v2/models/m/versions/03/infer", Route(Endpoint.MODEL_INFER, "m", "3")),
        (b"/v2/models/infer", Route(Endpoint.MODEL_METADATA, "infer")),
        (b"/v2/models/versions/versions/1/infer", Route(Endpoint.MODEL_INFER, "versions", "1")),
        (b"/v2/models/a%20b/infer", Route(Endpoint.MODEL_INFER, "a b")),
        (b"/v2/models/%2e%2e%2fetc%2fpasswd/infer", Route(Endpoint.MODEL_INFER, "../etc/passwd")),
        (b"/v2/models/a%00b", Route(Endpoint.MODEL_METADATA, "a\0b")),
        (b"/v2/models/%ff", Route(Endpoint.MODEL_METADATA, "\ufffd")),
        (b"/v2/models/%", Route(Endpoint.MODEL_METADATA, "%")),
        (b"/v2/models/../infer", Route(Endpoint.MODEL_INFER, "..")),
        (b"/v2/models/" + b"m" * 65536, Route(Endpoint.MODEL_METADATA, "m" * 65536)),
    ],
)
def test_paths(path: bytes, route: Route) -> None:
    assert match_route(route.endpoint.method, path) == route


MISSING = b"""
    /v1 /V2 /v2/health /v2/health/live/ /v2/models//infer /v2/models/m/ /v2/models/m/infer/ /v2/models/m/Infer
    /v2/models/m/versions /v2/models/m/versions/ /v2/models/m/versions/x/infer
    /v2/models/m/versions/-1/infer /v2/models/m/versions/%31/infer /v2/models/m/versions/1/versions/1
    /v2/models/m/versions/1/trace/setting"""


@pytest.mark.parametrize("path", [b"", b"/v2/models/m/versions/" + b"1" * 5000, *MISSING.split()])
def test_paths_that_do_not_exist(path: bytes) -> None:
    assert match_route("GET", path) == NOT_FOUND == RouteError(404, "Not Found")


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "get"])
def test_methods(method: str) -> None:
    paths = {
        b"/v2": "GET",
        b"/v2/models/m/infer": "POST",
        b"/v2/repository/index": "POST",
        b"/metrics": "GET",
    }
    for path, allowed in paths.items():
        answer = match_route(method, path)
        if method == allowed:
            assert isinstance(answer, Route)
        else:
            assert answer == RouteError(405, "Method Not Allowed", allowed)


def test_settings_are_read_and_changed_at_one_path() -> None:
    path = b"/v2/models/m/trace/setting"
    assert match_route("GET", path) == Route(Endpoint.TRACE_SETTING, "m")
    assert match_route("POST", path) == Route(Endpoint.TRACE_UPDATE, "m")
    assert match_route("POST", b"/v2/logging") == Route(Endpoint.LOGGING_UPDATE)
    assert match_route("PUT", b"/v2/logging") == RouteError(405, "Method Not Allowed", "GET, POST")


@given(st.binary())
def test_any_bytes_lead_somewhere_or_nowhere(tail: bytes) -> None:
    route = match_route("GET", b"/v2/models/" + tail)
    assert isinstance(route, RouteError) or route.endpoint is Endpoint.MODELS or route.model_name != ""


def test_endpoints_are_all_different() -> None:
    assert len(Endpoint) == len(Endpoint.__members__)  # equal values would be one member


def test_a_call_of_grpc_has_to_say_that_it_is_one() -> None:
    path = b"/inference.GRPCInferenceService/ModelInfer"
    assert match_route("GET", path) == RouteError(405, "Method Not Allowed", "POST")
    refusal = match_route("POST", path)
    assert isinstance(refusal, RouteError)
    assert (refusal.status, "application/grpc" in refusal.text) == (415, True)
    assert match_route("POST", path + b"s") == match_route("POST", path.replace(b"M", b"%4D")) == NOT_FOUND


def test_what_not_every_server_has_is_there_only_where_it_has_it() -> None:
    assert match_route("GET", b"/") == match_route("GET", b"/", {"dashboard"}) == Route(Endpoint.ROOT)
    live = match_route("GET", b"/dashboard/live", {"dashboard"})
    assert live == Route(Endpoint.DASHBOARD_LIVE)
    history = match_route("GET", b"/dashboard/history/a%2Fb/7", {"dashboard"})
    assert history == Route(Endpoint.DASHBOARD_HISTORY, "a/b", "7")
    for path in (b"/dashboard/live", b"/dashboard/page.js", b"/dashboard/history"):
        assert match_route("GET", path, {"admin"}) is NOT_FOUND
