"""Envoy in front of servers of a test, as ``gpuserve export envoy`` configures it. No test is here."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manifests import documents
from operated import OperatedServer
from processes import wait_until

from gpuserve.cli.export import envoy_proxy
from gpuserve.cli.export.export_options import ExportOptions
from gpuserve.cli.export.manifest_values import TLS_FOLDER
from gpuserve.config.load import load_file

TIMEOUT_S = 20.0
_PROGRAM = str(Path(sys.executable).with_name("envoy"))
_ROLES = {"http": "HTTP", "grpc": "gRPC"}
#: Of Envoy, by the name of the listener, and of its admin interface.
_PORTS = ("http", "grpc", "status", "admin")


class EnvoyInFront:
    """Its ports on this machine, as ``host:port``; ``log`` is what it said."""

    def __init__(self, folder: Path, ports: Mapping[str, int]) -> None:
        self.http, self.grpc, self.status, self.admin = (f"localhost:{ports[name]}" for name in _PORTS)
        self.log = folder / "envoy.log"

    def ask_admin(self, path: str, method: str = "GET") -> str:
        return fetched(self.admin, path, method)[1]

    def counter(self, name: str) -> int:
        """Of both clusters together."""
        lines = self.ask_admin(f"/stats?filter=^cluster\\.(http|grpc)\\.{name}$").splitlines()
        return sum(int(line.rpartition(": ")[2]) for line in lines)


@contextlib.contextmanager
def in_front_of(
    folder: Path, config: Path, servers: Sequence[OperatedServer], tls_folder: str = TLS_FOLDER
) -> Iterator[EnvoyInFront]:
    """Run Envoy in the block, as exported for the servers' ``config`` and moved to ports of this machine."""
    folder.mkdir()
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    files = envoy_proxy.envoy_files(load_file(str(config), {}), ExportOptions(name="localhost"))
    for name, text in files.items():
        moved = text.replace(envoy_proxy.ENVOY_FOLDER, str(folder)).replace(TLS_FOLDER, tls_folder)
        (folder / name).write_text(moved)
    bootstrap = folder / envoy_proxy.BOOTSTRAP_FILE
    (document,) = documents(bootstrap.read_text())
    _move(document, ports, servers)
    bootstrap.write_text(json.dumps(document))
    envoy = EnvoyInFront(folder, ports)
    command = [
        _PROGRAM,
        "-c",
        str(bootstrap),
        "--concurrency",
        "2",
        "--disable-hot-restart",
    ]
    with envoy.log.open("w") as log, subprocess.Popen([*command, "-l", "warning"], stderr=log) as process:
        try:
            wait_until(lambda: _is_live(envoy), f"Envoy is ready: {envoy.log}", TIMEOUT_S)
            n_members = (len(document["static_resources"]["clusters"]) - 1) * len(servers)
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


def _move(document: dict[str, Any], ports: Mapping[str, int], servers: Sequence[OperatedServer]) -> None:
    """Give Envoy these ports of this machine, and its clusters the servers, each of which has its own."""
    document["admin"]["address"]["socket_address"]["port_value"] = ports["admin"]
    for one in document["static_resources"]["listeners"]:
        one["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": ports[one["name"]]}
    for one in document["static_resources"]["clusters"]:
        (group,) = one["load_assignment"]["endpoints"]
        (pod,) = (each["endpoint"] for each in group["lb_endpoints"])
        if one["name"] == "admin":
            pod["address"]["socket_address"]["port_value"] = ports["admin"]
            continue
        one["type"] = "STATIC"
        del one["dns_lookup_family"]
        group["lb_endpoints"] = [{"endpoint": _moved(pod, one["name"], server)} for server in servers]


def _moved(pod: dict[str, Any], cluster: str, server: OperatedServer) -> dict[str, Any]:
    ports = {role: int(at.rpartition(":")[2]) for role, at in server.addresses.items()}
    moved = pod | {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": ports[_ROLES[cluster]]}}
    }
    if "health_check_config" in pod:
        moved["health_check_config"] = {"port_value": ports["health"]}
    return moved


def _is_live(envoy: EnvoyInFront) -> bool:
    try:
        return envoy.ask_admin("/ready").startswith("LIVE")
    except OSError:
        return False
