"""Which endpoints need the token: every one has its group, and only its own."""

from __future__ import annotations

import ast
import hmac
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

import gpuserve.front.endpoint
from gpuserve import Server
from gpuserve.access import ENDPOINT_GROUPS
from gpuserve.errors import ConfigError
from gpuserve.front.endpoint import grpc_rpcs
from gpuserve.front.endpoint.asgi import MODEL_INFER, MODEL_STREAM_INFER
from gpuserve.front.endpoint.restrictions import (
    GROUP_OF_ENDPOINT,
    GROUP_OF_METHOD,
    Restrictions,
    restrictions,
)
from gpuserve.front.endpoint.routes import Endpoint

TOKEN = "right"
_SERVICES = ("/inference.GRPCInferenceService/", "/grpc.health.v1.Health/")


def served_methods() -> set[str]:
    """Every method path in the sources of the endpoint, and those of the tables."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    protocol = {f"/{service.full_name}/{method.name}" for method in service.methods}
    return protocol | set(grpc_rpcs.UNARY) | {MODEL_INFER, MODEL_STREAM_INFER} | set(written_paths())


def written_paths() -> list[str]:
    folder = Path(gpuserve.front.endpoint.__file__).parent
    constants = [
        node.value
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [text for text in constants if text.startswith(_SERVICES) and not text.endswith("/")]


def test_every_endpoint_has_a_group() -> None:
    assert set(GROUP_OF_ENDPOINT) == set(Endpoint)
    assert set(GROUP_OF_ENDPOINT.values()) <= set(ENDPOINT_GROUPS)


def test_every_method_has_a_group() -> None:
    assert served_methods() - set(GROUP_OF_METHOD) == set()
    assert set(GROUP_OF_METHOD.values()) == set(ENDPOINT_GROUPS)


def test_without_restrictions_there_is_no_guard() -> None:
    assert restrictions((), TOKEN) is None
    assert isinstance(restrictions(("trace",), TOKEN), Restrictions)


def test_restrictions_without_a_token_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="without an access token"):
        restrictions(("trace",), None)


@pytest.mark.parametrize("group", ENDPOINT_GROUPS)
def test_a_group_closes_its_endpoints_and_no_others(group: str) -> None:
    guard = Restrictions([group], TOKEN)
    closed = {one for one in Endpoint if guard.refuses_endpoint(one, [])}
    assert closed == {one for one, its in GROUP_OF_ENDPOINT.items() if its == group}
    methods = {path for path in GROUP_OF_METHOD if guard.refuses_method(path, [])}
    assert methods == {path for path, its in GROUP_OF_METHOD.items() if its == group}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ([], True),
        ([b""], True),
        ([b"wrong"], True),
        ([b"right "], True),
        ([b"\xff"], True),
        ([b"right"], False),
        ([b"wrong", b"right"], False),
    ],
)
def test_only_the_token_opens(given: list[bytes], refused: bool) -> None:
    guard = Restrictions(["inference"], TOKEN)
    assert guard.refuses_endpoint(Endpoint.MODEL_INFER, given) is refused
    assert guard.refuses_method(MODEL_INFER, given) is refused


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(given)
        return real(given, known)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert not Restrictions(["inference"], TOKEN).refuses_method(MODEL_INFER, [b"b", b"right"])
    assert compared == [b"b", b"right"]


def test_a_method_that_there_is_not_is_left_to_its_door() -> None:
    assert not Restrictions(ENDPOINT_GROUPS, TOKEN).refuses_method("/inference.GRPCInferenceService/Nope", [])


# ---- the settings of a server -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"restricted_endpoints": ("tracing",), "access_token": "a"},
            "expected a list of any of health, inference",
        ),
        ({"restricted_endpoints": "trace", "access_token": "a"}, "given 'trace'"),
        ({"restricted_endpoints": ("trace",)}, "restricted_endpoints need an access_token"),
        ({"access_token": ""}, "access_token: expected a string that is not empty"),
        ({"access_token": "a\nsecret"}, "access_token: expected printable ASCII"),
        ({"http_header_forward_pattern": "("}, "http_header_forward_pattern: expected a regular expression"),
        ({"grpc_header_forward_pattern": "*"}, "grpc_header_forward_pattern: expected a regular expression"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Server(**settings)  # type: ignore[arg-type]
    assert text in str(error.value)
    assert "secret" not in str(error.value)
