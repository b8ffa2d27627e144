"""The access table has a row for everything there is, the policy judges by it, and knows local clients."""

from __future__ import annotations

import ast
import hmac
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tritonclient.grpc import service_pb2

import gpuserve.front
from gpuserve import Server
from gpuserve.config.settings.server import ServerSettings, all_access_rules
from gpuserve.config.settings.values import ADMIN, CONTROL_GROUPS, DASHBOARD, ENDPOINT_GROUPS, AccessRule
from gpuserve.core.errors import ConfigError, PermissionDenied, Unavailable
from gpuserve.front.net.exchange import ConnectionEndpoints
from gpuserve.front.protocols.access import endpoints
from gpuserve.front.protocols.access.authorization import (
    GRPC_PREFIX,
    UNIX,
    AccessPolicy,
    Verdict,
    address_of,
    grpc_address,
    is_local_client,
    token_headers,
)
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
    tables = {*unary_rpcs.UNARY, unary_rpcs.MODEL_INFER, unary_rpcs.MODEL_STREAM_INFER}
    return protocol | tables | written_paths()


def written_paths() -> set[str]:
    return {
        node.value
        for file in Path(gpuserve.front.__file__).parent.rglob("*.py")
        if file.name != Path(endpoints.__file__).name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith(_SERVICES) and not node.value.endswith("/")
    }


def judged(
    policy: AccessPolicy, access: Access, *headers: tuple[bytes, bytes], local: bool = True, prefix: str = ""
) -> Verdict:
    return policy.judge(access, headers, is_local=local, prefix=prefix)


# ---- the table ----------------------------------------------------------------------------------


def test_every_method_has_a_row_of_a_group_of_the_settings() -> None:
    assert served_methods() == set(METHODS)
    assert {endpoint.access.group for endpoint in Endpoint} == set(ENDPOINT_GROUPS)
    assert {access.group for access in METHODS.values()} == set(ENDPOINT_GROUPS) - {ADMIN, DASHBOARD}
    guarded = {access.group for access in ROWS if access.kind not in {AccessKind.USE, AccessKind.BARE}}
    assert guarded == {*CONTROL_GROUPS, DASHBOARD}


def test_only_endpoints_that_are_posted_change_the_server() -> None:
    methods = {kind: {one.method for one in Endpoint if one.access.kind is kind} for kind in AccessKind}
    assert methods[AccessKind.INSIGHT] == {"GET"}
    changing = {AccessKind.CONTROL, AccessKind.EITHER}
    assert methods[AccessKind.CONTROL] | methods[AccessKind.EITHER] == {"POST"}
    reading = {one.name for one in Endpoint if one.method == "POST" and one.access.kind not in changing}
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


BEARER = b"authorization"


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ([], False),
        *(
            ([(HEADER, wrong)], False)
            for wrong in (b"", b"wrong", b"right ", b"righ", b"RIGHT", b"\xff", b"r" * 65536, b"Bearer right")
        ),
        ([(b"other", b"right")], False),
        *(
            ([(BEARER, wrong)], False)
            for wrong in (b"right", b"Basic right", b"Bearer wrong", b"Bearerright")
        ),
        ([(HEADER, b"right")], True),
        ([(HEADER, b"wrong"), (HEADER, b"right")], True),
        ([(BEARER, b"Bearer right")], True),
        ([(BEARER, b"bearer  right ")], True),
    ],
)
@pytest.mark.parametrize("prefix", ["", GRPC_PREFIX])
def test_only_the_token_opens(headers: list[tuple[bytes, bytes]], allowed: bool, prefix: str) -> None:
    policy = AccessPolicy([AccessRule(("inference",), TOKEN)])
    expected = Verdict.ALLOWED if allowed else Verdict.NO_TOKEN
    assert judged(policy, INFERENCE, *headers, prefix=prefix) is expected


def test_the_prefix_of_grpc_is_for_grpc() -> None:
    policy = AccessPolicy([AccessRule(("inference",), TOKEN)])
    shown = GRPC_PREFIX.encode() + HEADER, b"right"
    assert judged(policy, INFERENCE, shown, prefix=GRPC_PREFIX) is Verdict.ALLOWED
    assert judged(policy, INFERENCE, shown) is Verdict.NO_TOKEN


def test_each_token_opens_its_own_groups() -> None:
    client = AccessRule(("inference",), "client")
    policy = AccessPolicy([client, AccessRule(("inference", "trace"), "operator", header="My-Key")])
    groups = ("inference", "trace")
    opened = {
        token: [judged(policy, Access(group), (BEARER, b"Bearer " + token)).name for group in groups]
        for token in (b"client", b"operator")
    }
    assert opened == {b"client": ["ALLOWED", "NO_TOKEN"], b"operator": ["ALLOWED", "ALLOWED"]}
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
    compare = Mock(wraps=hmac.compare_digest)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    policy = AccessPolicy([AccessRule(("inference",), TOKEN)])
    assert judged(policy, INFERENCE, (HEADER, b"b"), (BEARER, b"Bearer right")) is Verdict.ALLOWED
    assert [one.args[0] for one in compare.call_args_list] == [b"b", b"right"]


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


NO_GROUPS = "access_rules[0].groups must be a non-empty list of any of"


def rules(*given: Any) -> dict[str, Any]:
    return {"access_rules": (AccessRule(*given),)}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"restricted_endpoints": ("tracing",), "access_token": "a"},
            "a list of any of 'admin', 'dashboard', 'h",
        ),
        ({"restricted_endpoints": "trace", "access_token": "a"}, "got 'trace'"),
        ({"restricted_endpoints": ("trace",)}, "restricted_endpoints need an access_token"),
        ({"access_token": ""}, "access_token: expected a string that is not empty"),
        ({"access_token": "a\nsecret"}, "access_token: expected printable ASCII"),
        ({"remote_control": ("inference",)}, "remote_control must be a list of any of 'admin', 'logging'"),
        ({"access_rules": ({"groups": ["trace"]},)}, "access_rules[0].token is missing"),
        (rules((), "secret"), NO_GROUPS),
        (rules(("tracing",), "secret"), NO_GROUPS),
        (rules(("trace",), "secret "), "access_rules[0].token: expected printable"),
        (rules(("trace",), "secret", "a b"), "access_rules[0].header: expected a header's name"),
        (rules(("trace",), "secret", "Authorization"), "Authorization carries 'Bearer' tokens"),
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


HOST = (b"host", b"localhost:8000")


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        ([], Verdict.ALLOWED),  # no browser
        ([HOST, (b"origin", b"http://localhost:8000")], Verdict.ALLOWED),
        ([HOST, (b"sec-fetch-site", b"same-origin")], Verdict.ALLOWED),
        ([HOST, (b"sec-fetch-site", b"none")], Verdict.ALLOWED),
        ([HOST, (b"origin", b"http://localhost:3000")], Verdict.REMOTE),
        ([HOST, (b"origin", b"http://127.0.0.1:8000")], Verdict.REMOTE),
        ([HOST, (b"origin", b"null")], Verdict.REMOTE),
        ([HOST, (b"sec-fetch-site", b"same-site")], Verdict.REMOTE),
        ([HOST, (b"sec-fetch-site", b"cross-site")], Verdict.REMOTE),
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


# ---- clients of this machine ----


LOCAL = ("127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", UNIX)
OTHERS = (
    "",
    "10.0.0.1",
    "0.0.0.0",
    "::",
    "fe80::1%eth0",
    "::ffff:10.0.0.1",
    "128.0.0.1",
    "localhost",
    "127.1",
    "x",
)
FORWARDED = b"""forwarded via x-forwarded-for x-forwarded-host x-forwarded-proto x-real-ip
    x-envoy-external-address x-original-forwarded-for cf-connecting-ip true-client-ip"""


def test_local_addresses() -> None:
    for address in LOCAL:
        assert is_local_client(address, [(b"host", b"example.com"), (b"user-agent", b"curl")]), address
    for address in OTHERS:
        assert not is_local_client(address, []), address


@pytest.mark.parametrize("name", FORWARDED.split())
@pytest.mark.parametrize("address", ["127.0.0.1", UNIX])
def test_what_was_forwarded_is_not_local(name: bytes, address: str) -> None:
    assert not is_local_client(address, [(name, b"127.0.0.1")])


def test_a_page_of_another_host_is_not_local() -> None:
    for origin in (b"http://localhost:8000", b"https://127.0.0.1", b"http://[::1]:8000"):
        assert is_local_client("127.0.0.1", [(b"origin", origin)]), origin
    for origin in (
        b"https://example.com",
        b"http://localhost.example.com",
        b"http://example.com/localhost",
        b"http://localhost@example.com",
        b"null",
        b"",
        b"http://[::1",
        b"\xff\xfe",
    ):
        assert not is_local_client("127.0.0.1", [(b"origin", origin)]), origin


def test_the_peers_of_grpc() -> None:
    peers = {
        "ipv4:127.0.0.1:5000": "127.0.0.1",
        "ipv6:%5B::1%5D:5000": "::1",
        "ipv6:[fd00::2]:5000": "fd00::2",
    }
    peers |= {"unix:": UNIX, "unix:/run/s.sock": UNIX, "unix-abstract:name": UNIX}
    peers |= {"vsock:1:2": "", "": "", "127.0.0.1:5": ""}
    assert {peer: grpc_address(peer) for peer in peers} == peers


@pytest.mark.parametrize(
    ("peer", "own", "address"),
    [
        (("127.0.0.1", 5), ("127.0.0.1", 8000), "127.0.0.1"),
        (None, ("/run/s.sock", None), UNIX),
        (("", 0), ("/run/s.sock", None), UNIX),
        (None, ("127.0.0.1", 8000), ""),
    ],
)
def test_the_peers_of_our_own_server(peer: Any, own: Any, address: str) -> None:
    assert address_of(ConnectionEndpoints(peer, own, tls=False)) == address
