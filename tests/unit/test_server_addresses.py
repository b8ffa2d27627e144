"""Where a server is attached to, and who may: urls, names and users."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from gpuserve.core.errors import AttachError, ControlError
from gpuserve.supervisor.control.attach_protocol import attach_name, may_attach, port_of
from gpuserve.supervisor.control.operator_client import (
    ControlName,
    host_and_port,
    listening_names,
    reachable_names,
    running,
)


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
        "", ":8000", "localhost:0", "localhost:port", "localhost:70000", "ftp://localhost:8000",
        "http://localhost:8000/v2", "http://localhost:8000?a=b", "user@localhost:8000", "[::1:8000",
        8000, None,
    ],
)  # fmt: skip
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


# ---- control address -------------------------------------------------------------------------


HEAD = "Num       RefCount Protocol Flags    Type St Inode Path\n"
LINE = "0000000000000000: 00000002 00000000 {flags} 0005 01 4711 {path}\n"


def table(*paths: str, flags: str = "00010000") -> str:
    return HEAD + "".join(LINE.format(flags=flags, path=path) for path in paths)


def test_a_name_as_the_kernel_knows_it() -> None:
    assert ControlName(1000, "127.0.0.1", 8000).encode() == b"\0gpuserve/1000/control/127.0.0.1:8000"
    assert str(ControlName(1000, "::1", 8000)) == "[::1]:8000"


def test_names_are_found_in_the_kernels_table() -> None:
    text = table("@gpuserve/1000/control/0.0.0.0:8000", "@gpuserve/0/control/::1:8001")
    assert listening_names(text) == [ControlName(0, "::1", 8001), ControlName(1000, "0.0.0.0", 8000)]


@pytest.mark.parametrize(
    "path",
    [
        "", "/run/gpuserve/1000/control/0.0.0.0:8000", "@gpuserve/1000/port-8000",
        "@gpuserve/root/control/0.0.0.0:8000", "@gpuserve/1000/control/:8000",
        "@gpuserve/1000/control/0.0.0.0:http", "@gpuserve/1000/control/",
        "@other/1000/control/0.0.0.0:8000",
    ],
)  # fmt: skip
def test_other_names_are_none(path: str) -> None:
    assert listening_names(table(path)) == []


def test_connections_to_a_name_do_not_count() -> None:
    assert listening_names(table("@gpuserve/1000/control/0.0.0.0:8000", flags="00000000")) == []


def test_the_table_of_this_machine() -> None:
    name = ControlName(4_000_000_000, "127.0.0.77", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name.encode())
        listener.listen()
        assert name in listening_names(Path("/proc/net/unix").read_text("utf-8", "replace"))
    assert name not in listening_names(Path("/proc/net/unix").read_text("utf-8", "replace"))


@pytest.mark.thorough
def test_names_that_take_nobody_in_delay_commands_once() -> None:
    with contextlib.ExitStack() as opened:
        for port in (1, 2, 3):
            name = ControlName(os.geteuid(), "127.0.0.78", port).encode()
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(name)
            listener.listen(0)
            with contextlib.suppress(BlockingIOError):
                while True:
                    waiting = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    waiting.setblocking(False)
                    waiting.connect(name)
        started = time.monotonic()
        running()
        assert time.monotonic() - started < 9.0  # 15 s if each was waited for


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("localhost:9000", ("localhost", 9000)),
        ("localhost", ("localhost", 8000)),
        ("9000", ("localhost", 9000)),
        ("127.0.0.2:1", ("127.0.0.2", 1)),
        ("http://localhost:9000/", ("localhost", 9000)),
        ("grpcs://host:9001", ("host", 9001)),
        ("[::1]:9000", ("::1", 9000)),
    ],
)
def test_what_an_address_names(server: str, expected: tuple[str, int]) -> None:
    assert host_and_port(server) == expected


@pytest.mark.parametrize(
    "server", ["", ":8000", "a:b", "a:0", "a:70000", "70000", "ftp://a:1", "a:1/v2", "a:1?x=y", "[::1:8000"]
)
def test_what_is_no_address(server: str) -> None:
    with pytest.raises(ControlError, match=r"expected localhost:8000, .* given "):
        host_and_port(server)


@pytest.mark.parametrize(
    ("own", "addresses", "is_meant"),
    [
        ("127.0.0.1", {"127.0.0.1", "::1"}, True),
        ("0.0.0.0", {"127.0.0.1"}, True),
        ("::", {"127.0.0.9"}, True),
        ("127.0.0.2", {"127.0.0.1"}, False),
        ("0.0.0.0", set(), False),
    ],
)
def test_which_names_are_meant(own: str, addresses: set[str], is_meant: bool) -> None:
    names = [ControlName(0, own, 8000), ControlName(0, own, 8001)]
    assert reachable_names(names, addresses, 8000) == ([names[0]] if is_meant else [])
