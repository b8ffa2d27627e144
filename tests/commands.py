"""An operator's commands to a running server: by the command line as it is, or by the socket behind it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from typing import Any

from operated import TIMEOUT_S, Client, OperatedServer
from serving import GPUSERVE

from gpuserve.supervisor.control import operator_client
from gpuserve.supervisor.control.operator_protocol import VerbOutcome


@dataclass
class Asked:
    """What became of a verb, and what was told on the way."""

    outcome: VerbOutcome
    told: list[str] = field(default_factory=list)


def ask(server: str, verb: str, **arguments: Any) -> VerbOutcome:
    """The outcome of a verb at a server, by one of its addresses."""
    return ask_and_hear(server, verb, **arguments).outcome


def ask_and_hear(server: str, verb: str, **arguments: Any) -> Asked:
    """The outcome, and the lines of progress before it."""
    told: list[str] = []
    return Asked(operator_client.ask(server, verb, arguments, told.append, TIMEOUT_S), told)


def status(server: str) -> dict[str, Any]:
    """The status of a server."""
    outcome = ask(server, "status")
    assert outcome.code == "", outcome.text
    return outcome.result


def row(server: str, model: str) -> dict[str, Any]:
    """The row of a model's only version in the status of a server."""
    (found,) = [one for one in status(server)["models"] if one["name"] == model]
    return dict(found)


def ingress_rows(server: OperatedServer) -> list[dict[str, Any]]:
    """What the status of a server says of each ingress process."""
    return list(status(server.addresses["HTTP"])["server"]["doors"])


def ingress_pids(server: OperatedServer) -> list[int]:
    """The ingress processes that are up, in the order of their numbers."""
    return [row["pid"] for row in ingress_rows(server) if row["state"] == "UP"]


def ingress_metric(server: OperatedServer, name: str) -> list[float]:
    """A metric of each ingress process, from the metrics port, which the front serves."""
    with Client(server.addresses["metrics"]) as client:
        lines = client.get("/metrics").body.decode().splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"gpuserve_door_{name}{{")]


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


def gpuserve(*arguments: str, server: OperatedServer | None = None, role: str = "HTTP") -> Ran:
    """Run ``gpuserve`` with these arguments."""
    where = () if server is None else ("--server", server.addresses[role])
    done = subprocess.run(
        [GPUSERVE, *arguments, *where], capture_output=True, text=True, check=False, timeout=2 * TIMEOUT_S
    )
    return Ran(done.returncode, done.stdout, done.stderr)
