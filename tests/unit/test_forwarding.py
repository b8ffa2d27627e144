"""Which headers become parameters of a request, and what they become."""

from __future__ import annotations

import pytest

from gpuserve.config.settings.values import header_pattern
from gpuserve.core.errors import InvalidArgument
from gpuserve.front.net.exchange import Head
from gpuserve.front.protocols.access.header_forwarding import HeaderForwarding, header_forwarding
from gpuserve.front.requests.inference import InferRequest


def forwarded(pattern: str, *headers: tuple[bytes, bytes]) -> dict[str, str]:
    return HeaderForwarding(pattern).parameters(headers)


def head(*headers: tuple[bytes, bytes]) -> Head:
    return Head("POST", b"/", headers, "2", None)


def test_without_a_pattern_nobody_looks() -> None:
    assert header_forwarding("") is None
    assert isinstance(header_forwarding("x"), HeaderForwarding)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("user", ["user", "x-user-id"]),
        ("^user$", ["user"]),
        ("X-USER", ["x-user-id"]),
        ("(?-i)X-USER", []),
        ("(?-i)x-user", ["x-user-id"]),
        ("a|tag", ["tag"]),
        (".*", ["user", "x-user-id", "tag"]),
    ],
)
def test_the_pattern_is_searched_in_lower_case_names(pattern: str, names: list[str]) -> None:
    headers = [(b"user", b"1"), (b"X-User-Id", b"2"), (b"tag", b"3")]
    assert list(forwarded(pattern, *headers)) == names


def test_values_are_text_and_repeated_headers_are_joined() -> None:
    headers = [(b"x-a", b"1"), (b"x-b", b"caf\xe9"), (b"x-a", b"2")]
    assert forwarded("x-", *headers) == {"x-a": "1, 2", "x-b": "café"}


@pytest.mark.parametrize(
    "name",
    [
        *("te", "host", "content-type", "content-length", "grpc-timeout", ":path", "trace-bin"),
        *("triton-access-token", "triton-grpc-protocol-triton-access-token", "x" * 257),
    ],
)
def test_headers_that_are_never_forwarded(name: str) -> None:
    assert forwarded(".*", (name.encode(), b"v"), (b"x", b"1")) == {"x": "1"}


@pytest.mark.parametrize("name", ["timeout", "priority", "Sequence_Id", "binary_data_output", "triton_x"])
def test_reserved_names_are_refused_only_where_they_match(name: str) -> None:
    header = (name.encode(), b"v")
    with pytest.raises(
        InvalidArgument,
        match=f"^header '{name.lower()}' has the name of a parameter and cannot be forwarded$",
    ):
        forwarded(".*", header)
    assert forwarded("^other$", header) == {}


def test_a_header_stands_over_a_parameter_of_the_body() -> None:
    request = InferRequest("m", "", "", {"user": "forged", "n": 1}, [], (), None)
    HeaderForwarding("user").add_to(request, head((b"user", b"ann")))
    assert request.parameters == {"user": "ann", "n": 1}


def test_requests_of_one_head_share_its_parameters_unless_they_have_their_own() -> None:
    shared, forwarding = head((b"user", b"ann")), HeaderForwarding("user")
    first, second, third = (InferRequest("m", "", "", own, [], (), None) for own in ({}, {}, {"n": 1}))
    for one in (first, second, third):
        forwarding.add_to(one, shared)
    assert first.parameters is second.parameters
    assert (second.parameters, third.parameters) == ({"user": "ann"}, {"n": 1, "user": "ann"})


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"expected a regular expression, given '\('"):
        header_pattern("(")
