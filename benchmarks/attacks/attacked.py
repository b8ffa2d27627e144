"""The attacked server: its configurations, its start (in a control group on request), and what it holds."""

from __future__ import annotations

import contextlib
import http.client
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.attacks.connections import trusting_context
from benchmarks.attacks.requests import MIB
from benchmarks.processes import Group, tree
from benchmarks.servers import ConfiguredGpuServe, echo_entry
from benchmarks.servers.server import MODELS_FOLDER, Ports, RunningServer, certificate, running

PLAIN_ECHO: Final = echo_entry("model.py:echo")


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
MORTAL: Final = Setting(models=(echo_entry("attacked.py:mortal"),), patience_s=60.0)
FEW_DESCRIPTORS: Final = Setting(descriptors=512, asks=("inference",))


class Attacked(ConfiguredGpuServe):
    """A server of our own with defaults of all other settings, whose metrics port speaks TLS."""

    def __init__(self, folder: Path, setting: Setting, ingress: int = 1, group: Group | None = None) -> None:
        pair = certificate(folder)
        settings = {
            **{"ingress_processes": ingress, "health_port": Ports.free().http, "tls_ports": ["metrics"]},
            **{"tls_certfile": str(pair.path), "tls_keyfile": str(pair.key)},
            **setting.server,
        }
        super().__init__(folder, setting.models, settings)
        self._descriptors = setting.descriptors
        self._group = group

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        command = super().command(ports, models)
        if self._descriptors:
            limit = f'ulimit -n {self._descriptors} && exec "$@"'
            command = ["/bin/sh", "-c", limit, "sh", *command]
        return self._group.within(*command) if self._group else command


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
    connection = http.client.HTTPSConnection(metrics, timeout=_TIMEOUT_S, context=trusting_context())
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(_HELD))
