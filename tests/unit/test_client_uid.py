"""The user id of a local client."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuserve.front.net.exchange import ConnectionEndpoints
from gpuserve.front.protocols.access.authorization import client_uid


def exchange(accepted: socket.socket, *headers: tuple[bytes, bytes]) -> Any:
    ends = ConnectionEndpoints(
        accepted.getpeername()[:2], accepted.getsockname()[:2], tls=False, socket=accepted
    )
    return SimpleNamespace(endpoints=ends, head=SimpleNamespace(headers=headers))


@pytest.mark.parametrize(
    ("listens", "connects"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "::1"), ("::1", "::1")]
)
def test_the_kernel_knows_who_is_at_the_other_end(listens: str, connects: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    with (
        socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::") as listener,
        socket.create_connection((connects, listener.getsockname()[1])) as client,
        listener.accept()[0] as accepted,
    ):
        assert client_uid(exchange(accepted)) == os.geteuid()
        assert client_uid(exchange(accepted, (b"x-forwarded-for", b"127.0.0.1"))) is None
        client.close()
        assert client_uid(exchange(accepted)) is None


def test_a_client_on_a_unix_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        with listener.accept()[0] as accepted:
            ends = ConnectionEndpoints(None, ("s", None), tls=False, socket=accepted)
            made: Any = SimpleNamespace(endpoints=ends, head=SimpleNamespace(headers=()))
            assert client_uid(made) == os.geteuid()


def test_a_client_elsewhere_or_behind_a_library_is_not_known() -> None:
    for ends in (
        ConnectionEndpoints(("127.0.0.1", 5), ("", 0), tls=False),
        ConnectionEndpoints(("10.0.0.1", 5), ("10.0.0.2", 6), tls=False),
    ):
        made: Any = SimpleNamespace(endpoints=ends, head=SimpleNamespace(headers=()))
        assert client_uid(made) is None
