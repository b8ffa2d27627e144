"""Where a server is attached to, and who may: urls, names and users."""

from __future__ import annotations

import socket

import pytest

from gpuserve.core.errors import AttachError
from gpuserve.supervisor.control.attach_protocol import attach_name, may_attach, port_of


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("localhost:9000", 9000),
        ("http://localhost:9000", 9000),
        ("http://localhost:9000/", 9000),
        ("grpc://localhost:9001", 9001),
        ("GRPC://LOCALHOST:9001", 9001),
        ("localhost", 8000),
        ("http://127.0.0.1", 8000),
        ("grpc://127.0.0.1", 8001),
        ("127.0.0.53:9000", 9000),
        ("0.0.0.0:9000", 9000),
        ("[::1]:9000", 9000),
        ("http://[::]:9000", 9000),
        (f"{socket.gethostname()}:9000", 9000),
    ],
)
def test_the_port_of_a_server_on_this_machine(url: str, port: int) -> None:
    assert port_of(url) == port


@pytest.mark.parametrize(
    "url",
    [
        "",
        ":8000",
        "localhost:0",
        "localhost:port",
        "localhost:70000",
        "ftp://localhost:8000",
        "http://localhost:8000/v2",
        "http://localhost:8000?a=b",
        "user@localhost:8000",
        "[::1:8000",
        8000,
        None,
    ],
)
def test_what_is_no_url_of_a_server(url: object) -> None:
    with pytest.raises(AttachError, match=r"expected localhost:8000, .* given"):
        port_of(url)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["example.com:8000", "grpc://192.0.2.7:8001", "[2001:db8::1]:8000"])
def test_another_machine(url: str) -> None:
    with pytest.raises(AttachError, match=r"attaching works on one machine only, and '.*' is not this one"):
        port_of(url)


def test_the_name_tells_users_and_ports_apart() -> None:
    assert attach_name(1000, 8000) == b"\0gpuserve/1000/port-8000"
    assert len({attach_name(uid, port) for uid in (0, 1000) for port in (8000, 8001)}) == 4


@pytest.mark.parametrize(
    ("own", "peer", "trusted"),
    [(1000, 1000, True), (1000, 0, True), (0, 0, True), (1000, 1001, False), (0, 1000, False)],
)
def test_the_same_user_and_root_are_trusted(own: int, peer: int, trusted: bool) -> None:
    assert may_attach(own, peer) is trusted
