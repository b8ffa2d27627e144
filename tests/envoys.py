"""Envoy in front of servers of a test, as ``gpuserve export envoy`` configures it. No test is here."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from operated import OperatedServer
from processes import wait_until

from gpuserve.config.load import load_file
from gpuserve.export import envoy_proxy
from gpuserve.export.envoy_proxy import EnvoyProxy
from gpuserve.export.export_options import ExportOptions
from gpuserve.export.manifest_templates import yaml_text
from gpuserve.export.pod_sizing import ServerPorts

TIMEOUT_S = 20.0
_PROGRAM = str(Path(sys.executable).with_name("envoy"))
_ROLES = {"http": "HTTP", "grpc": "gRPC", "health": "health"}


class EnvoyInFront:
    """Its ports on this machine, as ``host:port``; ``log`` is what it said."""

    def __init__(self, folder: Path, made: EnvoyProxy) -> None:
        self.http, self.grpc = (f"localhost:{made.listen_ports[name]}" for name in ("http", "grpc"))
        self.status, self.admin = (f"localhost:{port}" for port in (made.status_port, made.admin_port))
        self.log = folder / "envoy.log"

    def ask_admin(self, path: str, method: str = "GET") -> str:
        return fetched(self.admin, path, method)[1]

    def counter(self, name: str) -> int:
        """Of both clusters together."""
        lines = self.ask_admin(f"/stats?filter=^cluster\\.(http|grpc)\\.{name}$").splitlines()
        return sum(int(line.rpartition(": ")[2]) for line in lines)


@contextlib.contextmanager
def in_front_of(
    folder: Path, config: Path, servers: Sequence[OperatedServer], **changes: Any
) -> Iterator[EnvoyInFront]:
    """Run Envoy in the block. ``config`` is that of the servers, ``changes`` are fields of ``EnvoyProxy``."""
    folder.mkdir()
    http_port, grpc_port, admin_port, status_port = free_ports(4)
    made = replace(
        EnvoyProxy.of(load_file(str(config), {}), ExportOptions(name="localhost")),
        listen_ports={"http": http_port, "grpc": grpc_port},
        admin_port=admin_port,
        status_port=status_port,
        address="127.0.0.1",
        folder=str(folder),
        endpoints_folder=str(folder),
        **changes,
    )
    for name, text in envoy_proxy.envoy_files(made).items():
        (folder / name).write_text(text)
    for name in made.clusters:
        (folder / f"{name}.yaml").write_text(yaml_text([_endpoints(made, name, servers)]))
    envoy = EnvoyInFront(folder, made)
    command = [
        _PROGRAM,
        "-c",
        str(folder / envoy_proxy.BOOTSTRAP_FILE),
        "--concurrency",
        "2",
        "--disable-hot-restart",
    ]
    with envoy.log.open("w") as log, subprocess.Popen([*command, "-l", "warning"], stderr=log) as process:
        try:
            wait_until(lambda: _is_live(envoy), f"Envoy is ready: {envoy.log}", TIMEOUT_S)
            n_members = len(made.clusters) * len(servers)
            wait_until(lambda: envoy.counter("membership_healthy") == n_members, "Envoy has seen all servers")
            yield envoy
        finally:
            process.kill()


def fetched(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """(status, body)."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _endpoints(made: EnvoyProxy, name: str, servers: Sequence[OperatedServer]) -> dict[str, Any]:
    """As in a cluster, but each server has ports of its own."""
    version = str(time.monotonic())
    document = envoy_proxy.endpoints_document(made, name, [], version)
    for server in servers:
        said = {role: server.addresses.get(name) for role, name in _ROLES.items()}
        ports = {role: int(at.rpartition(":")[2]) for role, at in said.items() if at is not None}
        there = replace(made, ports=ServerPorts(ports, made.ports.tls))
        one = envoy_proxy.endpoints_document(there, name, ["127.0.0.1"], version)
        _pods(document).extend(_pods(one))
    return document


def _pods(document: dict[str, Any]) -> list[Any]:
    found: list[Any] = document["resources"][0]["endpoints"][0]["lb_endpoints"]
    return found


def _is_live(envoy: EnvoyInFront) -> bool:
    try:
        return envoy.ask_admin("/ready").startswith("LIVE")
    except OSError:
        return False
