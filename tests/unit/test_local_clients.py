"""Clients that count as local to this machine."""

from __future__ import annotations

import pytest

from gpuserve.front.net.exchange import ConnectionEndpoints
from gpuserve.front.protocols.access.authorization import UNIX, address_of, grpc_address, is_local_client


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", UNIX])
def test_local(address: str) -> None:
    assert is_local_client(address, [(b"host", b"example.com"), (b"user-agent", b"curl")])


@pytest.mark.parametrize(
    "address",
    [
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
    ],
)
def test_not_local(address: str) -> None:
    assert not is_local_client(address, [])


@pytest.mark.parametrize(
    "name",
    [
        b"forwarded",
        b"via",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-real-ip",
        b"x-envoy-external-address",
        b"x-original-forwarded-for",
        b"cf-connecting-ip",
        b"true-client-ip",
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", UNIX])
def test_what_was_forwarded_is_not_local(name: bytes, address: str) -> None:
    assert not is_local_client(address, [(name, b"127.0.0.1")])


@pytest.mark.parametrize(
    ("origin", "local"),
    [
        (b"http://localhost:8000", True),
        (b"https://127.0.0.1", True),
        (b"http://[::1]:8000", True),
        (b"https://example.com", False),
        (b"http://localhost.example.com", False),
        (b"http://example.com/localhost", False),
        (b"http://localhost@example.com", False),
        (b"null", False),
        (b"", False),
        (b"http://[::1", False),
        (b"\xff\xfe", False),
    ],
)
def test_a_page_of_another_host_is_not_local(origin: bytes, local: bool) -> None:
    assert is_local_client("127.0.0.1", [(b"origin", origin)]) is local


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[fd00::2]:5000", "fd00::2"),
        ("unix:", UNIX),
        ("unix:/run/s.sock", UNIX),
        ("unix-abstract:name", UNIX),
        ("vsock:1:2", ""),
        ("", ""),
        ("127.0.0.1:5", ""),
    ],
)
def test_the_peers_of_grpc(peer: str, address: str) -> None:
    assert grpc_address(peer) == address


@pytest.mark.parametrize(
    ("ends", "address"),
    [
        (ConnectionEndpoints(("127.0.0.1", 5), ("127.0.0.1", 8000), tls=False), "127.0.0.1"),
        (ConnectionEndpoints(None, ("/run/s.sock", None), tls=False), UNIX),
        (ConnectionEndpoints(("", 0), ("/run/s.sock", None), tls=False), UNIX),
        (ConnectionEndpoints(None, ("127.0.0.1", 8000), tls=False), ""),
    ],
)
def test_the_peers_of_our_own_server(ends: ConnectionEndpoints, address: str) -> None:
    assert address_of(ends) == address
