"""Floors: servers without a model. What they answer with is the body that came, so what they cost is what
reading a request and writing an answer costs. They are no peers.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from benchmarks.peers import ServerMissing
from benchmarks.servers.server import ECHO, ECHO_BYTES, Api, Kind, Ports, Server


class Nghttpd(Server):
    """nghttpd: an HTTP/2 server in C on one thread, which can send an upload back."""

    name = "nghttpd"
    title = "nghttpd"
    kind = Kind.FLOOR
    apis = frozenset({Api.BODY_ECHO})
    models = frozenset({ECHO, ECHO_BYTES})
    roles = (("nghttpd", "nghttpd"),)

    def prepare(self) -> None:
        if not shutil.which("nghttpd"):
            raise ServerMissing("nghttpd is not on PATH (apt install nghttp2-server)")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        # Windows that no load fills, as the other servers have them; the default lets 64 KiB wait.
        windows = ("--window-bits=30", "--connection-window-bits=30", "--max-concurrent-streams=4096")
        return ["nghttpd", "--no-tls", "--echo-upload", "--address=127.0.0.1", *windows, str(ports.grpc)]

    def ready_paths(self, models: Sequence[str]) -> list[str]:
        return []
