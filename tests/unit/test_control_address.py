"""The names on which servers are operated, and which of them an address means."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from gpuserve.core.errors import ControlError
from gpuserve.supervisor.control.operator_client import (
    ControlName,
    host_and_port,
    listening_names,
    reachable_names,
    running,
)

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
        "",
        "/run/gpuserve/1000/control/0.0.0.0:8000",
        "@gpuserve/1000/port-8000",
        "@gpuserve/root/control/0.0.0.0:8000",
        "@gpuserve/1000/control/:8000",
        "@gpuserve/1000/control/0.0.0.0:http",
        "@gpuserve/1000/control/",
        "@other/1000/control/0.0.0.0:8000",
    ],
)
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
