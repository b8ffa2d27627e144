"""The attacked server: its configurations, and its start in a control group where one is asked for."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.attacks.requests import MIB
from benchmarks.control_groups import Group
from benchmarks.peers import PeerCache
from benchmarks.servers.ours import GpuServe
from benchmarks.servers.running import RunningServer, running
from benchmarks.servers.server import ECHO, MODELS_FOLDER, Ports

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

    def __init__(self, folder: Path, setting: Setting, doors: int = 1, group: Group | None = None) -> None:
        super().__init__(PeerCache(folder))
        self.config = folder / _CONFIG
        self._setting = setting
        self._doors = doors
        self._group = group
        self._pair = folder / "certificate.pem", folder / "key.pem"

    def prepare(self) -> None:
        super().prepare()
        certificate, key = map(str, self._pair)
        request = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost")
        subprocess.run([*request, "-out", certificate, "-keyout", key], check=True, capture_output=True)

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        server = {
            **{"host": "127.0.0.1", "doors": self._doors},
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
    folder: Path, setting: Setting, doors: int = 1, group: Group | None = None
) -> Iterator[tuple[RunningServer, Path]]:
    """Run a server with this configuration; give the server and its configuration file."""
    ours = Attacked(folder, setting, doors, group)
    ours.prepare()
    with running(ours, folder, [str(one["name"]) for one in setting.models]) as one:
        yield one, ours.config
