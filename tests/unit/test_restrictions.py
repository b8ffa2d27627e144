"""The access table has a row for everything there is, and the policy judges by it."""

from __future__ import annotations

import ast
import hmac
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

import gpuserve.front
from gpuserve import Server
from gpuserve.config.settings.server import ServerSettings, all_access_rules
from gpuserve.config.settings.values import ADMIN, CONTROL_GROUPS, DASHBOARD, ENDPOINT_GROUPS, AccessRule
from gpuserve.core.errors import ConfigError, PermissionDenied, Unavailable
from gpuserve.front.protocols.access import endpoints
from gpuserve.front.protocols.access.authorization import GRPC_PREFIX, AccessPolicy, Verdict, token_headers
from gpuserve.front.protocols.access.endpoints import METHODS, Access, AccessKind, Endpoint
from gpuserve.front.protocols.grpc import unary_rpcs

TOKEN = "right"
HEADER = b"triton-access-token"
_SERVICES = ("/inference.GRPCInferenceService/", "/grpc.")
ROWS = [*(endpoint.access for endpoint in Endpoint), *METHODS.values()]
INFERENCE = Access("inference")
PAGE = Endpoint.DASHBOARD_LIVE.access


def served_methods() -> set[str]:
    """Every method path in the sources of the endpoint, and those of the tables."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    protocol = {f"/{service.full_name}/{method.name}" for method in service.methods}
    return (
        protocol
        | set(unary_rpcs.UNARY)
        | {unary_rpcs.MODEL_INFER, unary_rpcs.MODEL_STREAM_INFER}
        | set(written_paths())
    )


def written_paths() -> list[str]:
    folder = Path(gpuserve.front.__file__).parent
    files = [file for file in folder.rglob("*.py") if file.name != Path(endpoints.__file__).name]
    constants = [
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [text for text in constants if text.startswith(_SERVICES) and not text.endswith("/")]


def judged(
    policy: AccessPolicy, access: Access, *headers: tuple[bytes, bytes], local: bool = True, prefix: str = ""
) -> Verdict:
    return policy.judge(access, headers, is_local=local, prefix=prefix)


# ---- the table ----------------------------------------------------------------------------------


def test_every_method_has_a_row_and_every_row_is_a_method() -> None:
    assert served_methods() == set(METHODS)


def test_the_groups_are_those_of_the_settings() -> None:
    assert {endpoint.access.group for endpoint in Endpoint} == set(ENDPOINT_GROUPS)
    assert {access.group for access in METHODS.values()} == set(ENDPOINT_GROUPS) - {ADMIN, DASHBOARD}
    guarded = {access.group for access in ROWS if access.kind not in {AccessKind.USE, AccessKind.BARE}}
    assert guarded == {*CONTROL_GROUPS, DASHBOARD}


def test_only_endpoints_that_are_posted_change_the_server() -> None:
    showing = {endpoint for endpoint in Endpoint if endpoint.access.kind is AccessKind.INSIGHT}
    assert {endpoint.method for endpoint in showing} == {"GET"}
    changing = {
        endpoint for endpoint in Endpoint if endpoint.access.kind in {AccessKind.CONTROL, AccessKind.EITHER}
    }
    assert {endpoint.method for endpoint in changing} == {"POST"}
    reading = {endpoint.name for endpoint in Endpoint if endpoint.method == "POST"} - {
        endpoint.name for endpoint in changing
    }
    inferring = {"MODEL_INFER", "MODEL_GENERATE", "MODEL_GENERATE_STREAM"}
    inferring |= {"OPENAI_CHAT", "OPENAI_COMPLETIONS", "OPENAI_EMBEDDINGS"}
    assert reading == inferring | {"REPOSITORY_INDEX", "REPOSITORY_NAMED"}


def test_what_depends_on_the_message_can_be_told_by_it() -> None:
    either = {path for path, access in METHODS.items() if access.kind is AccessKind.EITHER}
    assert either == set(unary_rpcs.CHANGES)
    for path, changes in unary_rpcs.CHANGES.items():
        kind: Any = getattr(service_pb2, f"{path.rpartition('/')[2]}Request")
        message = kind()
        assert not changes(message.SerializeToString())
        message.settings["log_info" if "Log" in path else "trace_rate"].SetInParent()
        assert changes(message.SerializeToString())


# ---- the judgement ------------------------------------------------------------------------------


def test_without_rules_everything_is_allowed_here_and_control_only_here() -> None:
    policy = AccessPolicy()
    assert {judged(policy, access) for access in ROWS} == {Verdict.ALLOWED}
    expected = {
        AccessKind.USE: Verdict.ALLOWED,
        AccessKind.CONTROL: Verdict.REMOTE,
        AccessKind.INSIGHT: Verdict.REMOTE,
        AccessKind.EITHER: Verdict.READ_ONLY,
        AccessKind.BARE: Verdict.ALLOWED,
    }
    for access in ROWS:
        assert judged(policy, access, local=False) is expected[access.kind]
        assert policy.is_public(access) is (access.kind in {AccessKind.USE, AccessKind.BARE})


@pytest.mark.parametrize("group", CONTROL_GROUPS)
def test_remote_control_opens_its_group_and_no_other(group: str) -> None:
    policy = AccessPolicy((), [group])
    closed = {access.group for access in ROWS if judged(policy, access, local=False) is not Verdict.ALLOWED}
    assert closed == {*CONTROL_GROUPS, DASHBOARD} - {group}


@pytest.mark.parametrize("group", ENDPOINT_GROUPS)
def test_a_rule_closes_its_group_and_its_token_opens_it_from_anywhere(group: str) -> None:
    policy = AccessPolicy([AccessRule((group,), TOKEN)], [*CONTROL_GROUPS, DASHBOARD])
    closed = {access.group for access in ROWS if judged(policy, access) is not Verdict.ALLOWED}
    assert closed == {group, *({DASHBOARD} if group in PAGE.shows else ())}
    shown = (HEADER, TOKEN.encode())
    assert {judged(policy, access, shown, local=False) for access in ROWS} == {Verdict.ALLOWED}
    assert not policy.is_public(Access(group))


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ([], False),
        ([(HEADER, b"")], False),
        ([(HEADER, b"wrong")], False),
        ([(HEADER, b"right ")], False),
        ([(HEADER, b"righ")], False),
        ([(HEADER, b"RIGHT")], False),
        ([(HEADER, b"\xff")], False),
        ([(HEADER, b"r" * 65536)], False),
        ([(b"other", b"right")], False),
        ([(b"authorization", b"right")], False),
        ([(b"authorization", b"Basic right")], False),
        ([(b"authorization", b"Bearer wrong")], False),
        ([(b"authorization", b"Bearerright")], False),
        ([(HEADER, b"Bearer right")], False),
        ([(HEADER, b"right")], True),
        ([(HEADER, b"wrong"), (HEADER, b"right")], True),
        ([(b"authorization", b"Bearer right")], True),
        ([(b"authorization", b"bearer  right ")], True),
    ],
)
@pytest.mark.parametrize("prefix", ["", GRPC_PREFIX])
def test_only_the_token_opens(headers: list[tuple[bytes, bytes]], allowed: bool, prefix: str) -> None:
    policy = AccessPolicy([AccessRule(("inference",), TOKEN)])
    expected = Verdict.ALLOWED if allowed else Verdict.NO_TOKEN
    assert judged(policy, INFERENCE, *headers, prefix=prefix) is expected


def test_the_prefix_of_grpc_is_for_grpc() -> None:
    policy, shown = (
        AccessPolicy([AccessRule(("inference",), TOKEN)]),
        (GRPC_PREFIX.encode() + HEADER, b"right"),
    )
    assert judged(policy, INFERENCE, shown, prefix=GRPC_PREFIX) is Verdict.ALLOWED
    assert judged(policy, INFERENCE, shown) is Verdict.NO_TOKEN


def test_each_token_opens_its_own_groups() -> None:
    policy = AccessPolicy(
        [
            AccessRule(("inference",), "client"),
            AccessRule(("inference", "trace"), "operator", header="My-Key"),
        ]
    )
    opened = {
        token: {
            group
            for group in ("inference", "trace")
            if judged(policy, Access(group), (b"authorization", b"Bearer " + token)) is Verdict.ALLOWED
        }
        for token in (b"client", b"operator")
    }
    assert opened == {b"client": {"inference"}, b"operator": {"inference", "trace"}}
    assert judged(policy, Access("trace"), (b"my-key", b"operator")) is Verdict.ALLOWED
    assert judged(policy, Access("trace"), (HEADER, b"operator")) is Verdict.NO_TOKEN
    assert judged(policy, INFERENCE, (b"my-key", b"client")) is Verdict.NO_TOKEN


def test_the_live_page_needs_the_tokens_of_what_it_shows_and_a_client_of_this_machine() -> None:
    policy = AccessPolicy(
        [AccessRule(("statistics",), "first"), AccessRule(("metadata",), "second", "My-Key")]
    )
    first, second = (HEADER, b"first"), (b"my-key", b"second")
    assert judged(policy, PAGE) is Verdict.NO_TOKEN
    assert judged(policy, PAGE, first) is judged(policy, PAGE, second) is Verdict.NO_TOKEN
    assert judged(policy, PAGE, first, second) is Verdict.ALLOWED
    assert judged(policy, PAGE, first, second, local=False) is Verdict.REMOTE
    assert "expecting header 'my-key'" in str(policy.refusal(PAGE, Verdict.NO_TOKEN))
    assert "dashboard: on, or a token" in str(policy.refusal(PAGE, Verdict.REMOTE))
    assert policy.is_public(Endpoint.ROOT.access)


def test_a_token_of_its_own_opens_the_live_page_from_anywhere_and_no_other_is_needed() -> None:
    policy = AccessPolicy([AccessRule(("statistics",), "first"), AccessRule((DASHBOARD,), "own")])
    assert judged(policy, PAGE, (HEADER, b"own"), local=False) is Verdict.ALLOWED
    assert judged(policy, PAGE, (HEADER, b"first")) is Verdict.NO_TOKEN
    assert judged(policy, PAGE) is Verdict.NO_TOKEN
    assert judged(policy, Endpoint.ROOT.access, local=False) is Verdict.ALLOWED


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(given)
        return real(given, known)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    policy = AccessPolicy([AccessRule(("inference",), TOKEN)])
    assert judged(policy, INFERENCE, (HEADER, b"b"), (b"authorization", b"Bearer right")) is Verdict.ALLOWED
    assert compared == [b"b", b"right"]


def test_what_a_refused_client_is_told() -> None:
    policy = AccessPolicy([AccessRule(("trace",), TOKEN, header="My-Key")])
    over_http = policy.refusal(Access("trace"), Verdict.NO_TOKEN)
    over_grpc = policy.refusal(Access("trace"), Verdict.NO_TOKEN, GRPC_PREFIX)
    assert (type(over_http), type(over_grpc)) == (Unavailable, Unavailable)
    ways = "header '{}', or 'authorization: Bearer' with the token"
    assert str(over_http) == "This API is restricted, expecting " + ways.format("my-key")
    assert str(over_grpc) == (
        "This protocol is restricted, expecting " + ways.format("triton-grpc-protocol-my-key")
    )
    assert isinstance(policy.refusal(Access("logging"), Verdict.REMOTE), PermissionDenied)


def test_headers_with_tokens_are_for_the_server_alone() -> None:
    assert token_headers(()) == {"triton-access-token", "triton-grpc-protocol-triton-access-token"}
    names = token_headers([AccessRule(("trace",), TOKEN, header="My-Key")])
    assert names - token_headers(()) == {"my-key", "triton-grpc-protocol-my-key", "authorization"}


# ---- the settings of a server -------------------------------------------------------------------


def test_the_short_form_is_a_rule() -> None:
    more = AccessRule(("trace",), "other")
    settings = ServerSettings(restricted_endpoints=("health",), access_token=TOKEN, access_rules=(more,))
    assert all_access_rules(settings) == (AccessRule(("health",), TOKEN), more)
    assert all_access_rules(ServerSettings(access_token=TOKEN)) == ()
    assert TOKEN not in repr(all_access_rules(settings))
    assert ServerSettings.from_wire(settings.to_wire()) == settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"restricted_endpoints": ("tracing",), "access_token": "a"},
            "must be a list of any of 'admin', 'dashboard', 'health'",
        ),
        ({"restricted_endpoints": "trace", "access_token": "a"}, "got 'trace'"),
        ({"restricted_endpoints": ("trace",)}, "restricted_endpoints need an access_token"),
        ({"access_token": ""}, "access_token: expected a string that is not empty"),
        ({"access_token": "a\nsecret"}, "access_token: expected printable ASCII"),
        ({"remote_control": ("inference",)}, "remote_control must be a list of any of 'admin', 'logging'"),
        (
            {"access_rules": ({"groups": ["trace"]},)},
            "access_rules[0].token is missing",
        ),
        (
            {"access_rules": (AccessRule((), "secret"),)},
            "access_rules[0].groups must be a non-empty list of any of",
        ),
        (
            {"access_rules": (AccessRule(("tracing",), "secret"),)},
            "access_rules[0].groups must be a non-empty list of any of",
        ),
        ({"access_rules": (AccessRule(("trace",), "secret "),)}, "access_rules[0].token: expected printable"),
        (
            {"access_rules": (AccessRule(("trace",), "secret", "a b"),)},
            "access_rules[0].header: expected a header's name",
        ),
        (
            {"access_rules": (AccessRule(("trace",), "secret", "Authorization"),)},
            "Authorization carries 'Bearer' tokens",
        ),
        ({"http_header_forward_pattern": "("}, "http_header_forward_pattern: expected a regular expression"),
        ({"grpc_header_forward_pattern": "*"}, "grpc_header_forward_pattern: expected a regular expression"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Server(**settings)
    assert text in str(error.value)
    assert "secret" not in str(error.value)


# ---- pages of other origins ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        ([], Verdict.ALLOWED),  # no browser
        ([(b"host", b"localhost:8000"), (b"origin", b"http://localhost:8000")], Verdict.ALLOWED),
        ([(b"host", b"localhost:8000"), (b"sec-fetch-site", b"same-origin")], Verdict.ALLOWED),
        ([(b"host", b"localhost:8000"), (b"sec-fetch-site", b"none")], Verdict.ALLOWED),
        ([(b"host", b"localhost:8000"), (b"origin", b"http://localhost:3000")], Verdict.REMOTE),
        ([(b"host", b"localhost:8000"), (b"origin", b"http://127.0.0.1:8000")], Verdict.REMOTE),
        ([(b"host", b"localhost:8000"), (b"origin", b"null")], Verdict.REMOTE),
        ([(b"host", b"localhost:8000"), (b"sec-fetch-site", b"same-site")], Verdict.REMOTE),
        ([(b"host", b"localhost:8000"), (b"sec-fetch-site", b"cross-site")], Verdict.REMOTE),
        ([(b"origin", b"http://localhost:3000")], Verdict.REMOTE),
    ],
)
def test_a_page_of_another_origin_changes_nothing(
    headers: list[tuple[bytes, bytes]], verdict: Verdict
) -> None:
    for access in ROWS:
        if access.kind is AccessKind.CONTROL:
            assert judged(AccessPolicy(), access, *headers) is verdict
            token = AccessPolicy([AccessRule((access.group,), TOKEN)])
            assert judged(token, access, *headers, (HEADER, TOKEN.encode())) is Verdict.ALLOWED
        elif access.kind in {AccessKind.USE, AccessKind.BARE}:
            assert judged(AccessPolicy(), access, *headers) is Verdict.ALLOWED
