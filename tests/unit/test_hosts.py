"""By which names pages in browsers may ask the server."""

from __future__ import annotations

import socket

import pytest
from http1_talk import Talk
from test_http_handler import House

from gpuserve.front.protocols.access.authorization import AccessPolicy, AllowedHosts, foreign_host
from gpuserve.front.protocols.http.http_handler import HttpHandler

BROWSER = (b"user-agent", b"Mozilla/5.0 (X11)")


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.0.0.1", "gpu01:8000", "",
        "triton.local", "a.localhost.:80", "m.models.svc.cluster.local",
    ],
)  # fmt: skip
def test_names_that_nobody_can_buy(host: str) -> None:
    assert foreign_host([(b"host", host.encode()), BROWSER]) is None


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "Evil.Example.", "127.1", "\xe9.b"]
)
@pytest.mark.parametrize(
    "mark",
    [
        BROWSER,
        (b"origin", b"null"),
        (b"accept-language", b""),
        (b"cookie", b"a"),
        (b"sec-fetch-mode", b"cors"),
    ],
)
def test_names_that_could_be_anybodys(host: str, mark: tuple[bytes, bytes]) -> None:
    given = (b"host", host.encode("latin-1"))
    assert foreign_host([given]) is None  # not a browser
    found = foreign_host([mark, given])
    assert found is not None
    refusal = AllowedHosts(()).refusal(found, "127.0.0.1")
    assert refusal is not None
    assert (refusal.status, "allowed_hosts" in refusal.text) == (421, True)
    assert AllowedHosts(()).refusal(found, "10.0.0.1") is None
    assert AllowedHosts(["other.example"]).refusal(found, "10.0.0.1") == refusal
    assert AllowedHosts(["*"]).refusal(found, "127.0.0.1") is None
    assert AllowedHosts([found.name.upper()]).refusal(found, "127.0.0.1") is None


def test_the_machines_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU.example")
    found = foreign_host([BROWSER, (b"host", b"gpu.example")])
    assert found is not None
    assert AllowedHosts(()).refusal(found, "::1") is None


async def test_a_page_of_anybodys_reads_nothing_on_either_port() -> None:
    def asked(path: str, host: str, *lines: str) -> bytes:
        return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()

    async with House() as house:
        handler = HttpHandler(house.service, house.requests, 1 << 20, AccessPolicy(), None, ["good.example"])
        for path, accept in (("/v2", handler.accept), ("/v2/health/live", handler.accept_metrics)):
            talk = Talk(handler=accept)
            for host, expected in (("evil.example", 421), ("good.example:8000", 200), ("localhost", 200)):
                talk.feed(asked(path, host, "Accept-Language: de"))
                assert talk.way.raw.startswith(b"HTTP/1.1 %d " % expected), host
                talk.way.raw = b""
            talk.feed(asked(path, "evil.example"))
            assert talk.way.raw.startswith(b"HTTP/1.1 200 ")  # no browser
