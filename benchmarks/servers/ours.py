"""This server, out of the environment that runs the benchmarks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.peers import ServerMissing
from benchmarks.servers.server import (
    ECHO,
    FORWARDED_HEADER,
    MODELS_FOLDER,
    TOKEN,
    TRACE_LEVEL,
    TRACE_RATE,
    Api,
    Kind,
    Option,
    Ports,
    Server,
)


class GpuServe(Server):
    """This server: the models of the benchmarks as its YAML files declare them."""

    name = "gpuserve"
    title = "gpuserve"
    kind = Kind.OURS
    stop_signal = signal.SIGINT  # SIGTERM has a lame duck
    options = frozenset(Option)
    apis = frozenset({Api.GRPC, Api.STREAM, Api.SHARED_MEMORY, Api.HTTP_BINARY, Api.HTTP_JSON})
    roles = (("gpuserve_worker", "worker"), ("gpuserve.front", "front"), ("gpuserve serve", "supervisor"))

    @property
    def _program(self) -> Path:
        return Path(sys.executable).parent / "gpuserve"

    def prepare(self) -> None:
        try:
            self.title = f"gpuserve {version('gpuserve')}"
        except PackageNotFoundError:
            raise ServerMissing(f"gpuserve is not installed in {sys.prefix}") from None

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        config = MODELS_FOLDER / ("echo.yaml" if tuple(models) == (ECHO,) else "all.yaml")
        flags = ["--http-port", ports.http, "--grpc-port", ports.grpc, "--metrics-port", ports.metrics]
        return [str(self._program), "serve", str(config), *map(str, flags), *self._option_flags()]

    def _option_flags(self) -> list[str]:
        match self.option:
            case None:
                return []
            case Option.TOKEN:
                return ["--restricted-endpoints", '["inference"]', "--access-token", TOKEN]
            case Option.TRACED:
                file = self.cache.folder / "gpuserve-trace.json"
                flags = ["--trace-level", f'["{TRACE_LEVEL}"]', "--trace-rate", str(TRACE_RATE)]
                return [*flags, "--trace-file", str(file)]
            case Option.COMPRESSED:
                return ["--grpc-response-compression", "low"]
            case Option.FORWARDED:
                return ["--grpc-header-forward-pattern", FORWARDED_HEADER]
            case Option.TLS:
                assert self.tls is not None
                flags = ["--tls-certfile", str(self.tls.path), "--tls-keyfile", str(self.tls.key)]
                return [*flags, "--tls-ports", '["grpc"]']

    def environment(self) -> dict[str, str]:
        # An installed package, as the peers are, has its byte code; a checkout gets it by the first start.
        return {"PYTHONDONTWRITEBYTECODE": ""}
