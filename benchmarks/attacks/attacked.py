"""The attacked server: its configurations, its start (in a control group on request), and what it holds."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.attacks.requests import MIB
from benchmarks.peers import PeerCache
from benchmarks.processes import Group, tree
from benchmarks.servers import GpuServe
from benchmarks.servers.server import ECHO, MODELS_FOLDER, Ports, RunningServer, certificate, running

_CONFIG: Final = "config.yaml"


def _echo(callable_: str) -> dict[str, Any]:
    tensors = {
        kind: [{"name": name, "dtype": "float32", "shape": [-1]}]
        for kind, name in (("inputs", "x"), ("outputs", "y"))
    }
    return {"name": ECHO, "callable": f"{MODELS_FOLDER}/{callable_}", **tensors, "max_batch_size": 64}


PLAIN_ECHO: Final = _echo("model.py:echo")


@dataclass(frozen=True, slots=True)
class Setting:
    """The configuration of an attacked server, and how the well-behaved client asks this server.

    ``descriptors``: the limit of open files of each of its processes. ``asks``: what the well-behaved client
    asks for; see ``bystander.py``. ``patience_s``: how long that client asks again after an error.
    """

    server: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[Mapping[str, Any]] = (PLAIN_ECHO,)
    descriptors: int = 0
    asks: tuple[str, ...] = ("inference", "health")
    patience_s: float = 0.0


PLAIN: Final = Setting()
SMALL_ARENA: Final = Setting({"max_arena_nbytes": 64 * MIB})
_TALKER: Final = {"name": "talker", "callable": f"{MODELS_FOLDER}/attacked.py:Talker", "openai": True}
OPENAI: Final = Setting(models=(PLAIN_ECHO, _TALKER))
OPENAI_ASKED: Final = Setting(models=(PLAIN_ECHO, _TALKER), asks=("inference", "health", "completion"))
MORTAL: Final = Setting(models=(_echo("attacked.py:mortal"),), patience_s=60.0)
FEW_DESCRIPTORS: Final = Setting(descriptors=512, asks=("inference",))


class Attacked(GpuServe):
    """A server of our own with defaults of all other settings, whose metrics port speaks TLS."""

    def __init__(self, folder: Path, setting: Setting, ingress: int = 1, group: Group | None = None) -> None:
        super().__init__(PeerCache(folder))
        self.config = folder / _CONFIG
        self._setting = setting
        self._ingress = ingress
        self._group = group
        self._pair = certificate(folder)

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        server = {
            **{"host": "127.0.0.1", "ingress_processes": self._ingress},
            **{"http_port": ports.http, "grpc_port": ports.grpc, "metrics_port": ports.metrics},
            **{"health_port": Ports.free().http, "tls_ports": ["metrics"]},
            **dict(zip(("tls_certfile", "tls_keyfile"), map(str, self._pair), strict=True)),
            **self._setting.server,
        }
        self.config.write_text(json.dumps({"server": server, "models": self._setting.models}))
        command: tuple[str, ...] = (str(self._program), "serve", str(self.config))
        if self._setting.descriptors:
            limit = f'ulimit -n {self._setting.descriptors} && exec "$@"'
            command = ("/bin/sh", "-c", limit, "sh", *command)
        return list(self._group.within(*command) if self._group else command)


@contextlib.contextmanager
def attacked(
    folder: Path, setting: Setting, ingress: int = 1, group: Group | None = None
) -> Iterator[tuple[RunningServer, Path]]:
    """Run a server with this configuration; give the server and its configuration file."""
    ours = Attacked(folder, setting, ingress, group)
    ours.prepare()
    with running(ours, folder, [str(one["name"]) for one in setting.models]) as one:
        yield one, ours.config


#: Gauges of what requests hold, which is nothing when no request is there.
_HELD: Final = ("gpuserve_arena_blocks", "gpuserve_door_arena_blocks", "gpuserve_intake_bytes")
_TIMEOUT_S: Final = 5.0


class Held(NamedTuple):
    """What a server holds at one moment; a page that several of its processes have counts once."""

    nbytes: int
    descriptors: int


def held(root_pid: int) -> Held:
    """Return what the process and its descendants hold; nothing of those that are gone."""
    nbytes = descriptors = 0
    for one in tree(root_pid):
        try:
            nbytes += one.memory.pss_nbytes
            descriptors += len(os.listdir(f"/proc/{one.pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Held(nbytes, descriptors)


def held_by_requests(metrics: str) -> int:
    """Return blocks and bytes that requests hold, by the metrics page at this address, which speaks TLS.
    Raises OSError: The page does not answer.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(metrics, timeout=_TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(_HELD))
