"""Servers in a control group with too little memory for all that clients send: who is over it is told so, the
others are answered, and the kernel kills nobody.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from config_file import model, tensor, write_config
from operated import InBackground, OperatedServer
from serving import FREE_PORTS, GPUSERVE

from benchmarks.attacks.connections import Calls
from benchmarks.attacks.requests import call_headers, framed, message
from benchmarks.processes import Group, memory_group
from gpuserve.cli.export.export_options import ExportOptions
from gpuserve.cli.export.pod_sizing import compute_sizes
from gpuserve.config.load import load_file

pytestmark = pytest.mark.thorough

MIB = 1 << 20
BODY_NBYTES = 100 * MIB
TIMEOUT_S = 60.0
ECHO = model("echo", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 64)
#: Of version 1 and 2 of control groups: what is used, and how often the kernel has killed for want of memory.
USED = "memory.usage_in_bytes", "memory.current"
EVENTS = "memory.oom_control", "memory.events"


def read(group: Group, names: tuple[str, ...]) -> str:
    return next(path.read_text() for name in names if (path := group.folder / name).exists())


def kills(group: Group) -> int:
    return int(dict(line.split() for line in read(group, EVENTS).splitlines())["oom_kill"])


@contextlib.contextmanager
def control_group(limit_nbytes: int) -> Iterator[Group]:
    """A group with this limit; skips the test where none can be made."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(limit_nbytes))
        except OSError as error:
            pytest.skip(f"needs the right to make a control group with a limit of memory: {error}")
        yield group


@contextlib.contextmanager
def served(group: Group, folder: Path, **settings: Any) -> Iterator[OperatedServer]:
    """A server in the group, of which nothing is killed."""
    config = write_config(folder, [ECHO], host="127.0.0.1", **settings)
    command = group.within(GPUSERVE, "serve", str(config), *FREE_PORTS)
    with OperatedServer(config, command=command).until_ended() as server:
        family = server.wait_ready().family()
        yield server
        assert kills(group) == 0
        assert server.family() == family
        assert server.infer("echo", 1.0).status == 200
        for gauge in ("gpuserve_intake_bytes", "gpuserve_arena_blocks"):
            assert server.metric(gauge) == 0


def by_http(server: OperatedServer) -> str:
    """What becomes of one large body: 200, or the refusal."""
    tensor_in = {"name": "x", "datatype": "FP32", "shape": [1, BODY_NBYTES // 4]}
    tensor_in["parameters"] = {"binary_data_size": BODY_NBYTES}
    head = json.dumps({"inputs": [tensor_in], "parameters": {"binary_data_output": True}}).encode()
    connection = http.client.HTTPConnection(server.addresses["HTTP"], timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v2/models/echo/infer")
        connection.putheader("Inference-Header-Content-Length", str(len(head)))
        connection.putheader("Content-Length", str(len(head) + BODY_NBYTES))
        connection.endheaders(head)
        with contextlib.suppress(OSError):  # who is refused need not be heard to the end
            for _ in range(0, BODY_NBYTES, MIB):
                connection.send(bytes(MIB))
        answer = connection.getresponse()
        return f"{answer.status} {answer.read().decode() if answer.status != 200 else answer.read() and ''}"


def by_grpc(method: str) -> Callable[[OperatedServer], str]:
    body = framed(message(BODY_NBYTES // 4))

    def ask(server: OperatedServer) -> str:
        host, _, port = server.addresses["gRPC"].rpartition(":")
        until_s = time.monotonic() + TIMEOUT_S
        with Calls((host, int(port)), call_headers(method), (body,), until_s) as calls:
            calls.begin()
            assert calls.answer()
            return str(calls.failures[0]) if calls.failures else "200 "

    return ask


def together(ask: Callable[[OperatedServer], str], server: OperatedServer, n: int) -> Counter[str]:
    """What became of so many at once; nothing but an answer, or a refusal for want of memory."""
    outcomes = [one.result() for one in [InBackground(ask, server) for _ in range(n)]]
    refused = [one for one in outcomes if "no memory" in one]
    assert all("503" in one or "RESOURCE_EXHAUSTED" in one for one in refused), refused
    assert set(outcomes) - set(refused) <= {"200 "}
    return Counter(refused=len(refused), answered=outcomes.count("200 "))


@pytest.mark.parametrize("max_arena_nbytes", [256 * MIB, 8 << 30])
@pytest.mark.parametrize("way", ["http", "ModelInfer", "ModelStreamInfer"])
def test_large_bodies_in_a_small_group(tmp_path: Path, way: str, max_arena_nbytes: int) -> None:
    ask = by_http if way == "http" else by_grpc(way)
    with (
        control_group(800 * MIB) as group,
        served(group, tmp_path, max_arena_nbytes=max_arena_nbytes) as server,
    ):
        found = together(ask, server, 12)
        assert found["refused"]
        assert found["answered"] or way == "ModelStreamInfer"  # they grow side by side, until none has room
        assert ask(server) == "200 "


def test_the_size_that_the_export_computes_is_enough(tmp_path: Path) -> None:
    settings = {"max_arena_nbytes": 1024 * MIB}
    configuration = load_file(str(write_config(tmp_path, [ECHO], **settings)), {})
    limit_nbytes = compute_sizes(configuration, ExportOptions(image="image")).memory_nbytes
    with control_group(limit_nbytes) as group, served(group, tmp_path, **settings) as server:
        assert together(by_http, server, 32)["answered"] >= 2


def test_page_cache_is_no_memory_in_use(tmp_path: Path) -> None:
    cached = tmp_path / "cached"
    write = f"import os; f = open({str(cached)!r}, 'wb'); f.write(bytes({450 * MIB})); os.fsync(f)"
    with control_group(800 * MIB) as group, served(group, tmp_path) as server:
        subprocess.run(group.within(sys.executable, "-c", write), check=True, timeout=TIMEOUT_S)
        if int(read(group, USED)) < 500 * MIB:
            pytest.skip("this file system's cache is not the group's")
        assert together(by_http, server, 2)["answered"] == 2
