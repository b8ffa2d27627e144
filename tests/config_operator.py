"""The operator of ``gpuserve serve`` who changes its config file and sends SIGHUP."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operated import OperatedServer
from processes import wait_until
from repositories import Client, write


class Operator:
    """The config file of a server, and the signal."""

    def __init__(self, server: OperatedServer, path: Path) -> None:
        self.server = server
        self._path = path
        self._settings: dict[str, Any] = {}

    def reload(self, *models: dict[str, Any], **settings: Any) -> None:
        """Put another file there and have it read."""
        self.write(*models, **settings)
        self.server.process.send_signal(signal.SIGHUP)

    def write(self, *models: dict[str, Any], **settings: Any) -> None:
        write(self._path, *models, **{"host": "127.0.0.1", "model_control": "none", **settings})

    def said(self, text: str) -> int:
        """In how many lines of the log it stands."""
        return sum(text in one["msg"] for one in self.server.messages())

    def wait_said(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.said(text) >= times, f"the log says {text!r}")

    def client(self, protocol: str = "grpc") -> Client:
        return Client(protocol, self.server.addresses["gRPC" if protocol == "grpc" else "HTTP"])


@contextmanager
def operated(folder: Path, *models: dict[str, Any], **settings: Any) -> Iterator[Operator]:
    path = folder / "config.yaml"
    operator = Operator(OperatedServer(path), path)
    operator.write(*models, **settings)
    with operator.server as server:
        server.wait_ready()
        yield operator
        assert server.end() == 0


def fifo(folder: Path, name: str) -> Path:
    path = folder / name
    os.mkfifo(path)
    return path


def traced(path: Path) -> list[int]:
    """Return the ids of the requests in a file of traces."""
    try:
        events = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return []
    return [one["id"] for one in events if "model_name" in one]
