"""The servers that are compared: how each is had, started and asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.peers import LITSERVE, MLSERVER, MOSEC, PYTRITON, PeerCache, ServerMissing
from benchmarks.servers.server import (
    ECHO,
    ECHO_BYTES,
    FORWARDED_HEADER,
    MODELS_FOLDER,
    TOKEN,
    TOKEN_KEY,
    TRACE_LEVEL,
    TRACE_RATE,
    Api,
    Kind,
    Option,
    Ports,
    RunningServer,
    Server,
    ServerFailed,
    running,
)

__all__ = [
    "SERVERS",
    "GpuServe",
    "PlainTriton",
    "Ports",
    "RunningServer",
    "Server",
    "ServerFailed",
    "running",
]


class GpuServe(Server):
    """This server: the models of the benchmarks as its YAML files declare them."""

    name = "gpuserve"
    title = "gpuserve"
    kind = Kind.OURS
    stop_signal = signal.SIGINT  # SIGTERM has a lame duck
    options = frozenset(Option)
    apis = frozenset({Api.GRPC, Api.STREAM, Api.SHARED_MEMORY, Api.HTTP_BINARY, Api.HTTP_JSON})
    roles = (
        ("gpuserve_worker", "worker"),
        ("gpuserve.front.process", "front"),
        ("gpuserve serve", "supervisor"),
    )

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
        return [*self._serve(config, ports), *self._option_flags()]

    def _serve(self, config: Path, ports: Ports) -> list[str]:
        """Return the command line that serves a configuration on these ports."""
        flags = ["--http-port", ports.http, "--grpc-port", ports.grpc, "--metrics-port", ports.metrics]
        return [str(self._program), "serve", str(config), *map(str, flags)]

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


def echo_entry(callable_: str, name: str = ECHO) -> dict[str, Any]:
    """Return the entry of a configuration for an FP32 echo of the folder of models: ``file.py:name``."""
    x, y = ({"name": tensor, "dtype": "float32", "shape": [-1]} for tensor in "xy")
    tensors = {"inputs": [x], "outputs": [y], "max_batch_size": 64}
    return {"name": name, "callable": f"{MODELS_FOLDER}/{callable_}", **tensors}


class ConfiguredGpuServe(GpuServe):
    """This server with models, and settings, of its own, by a configuration that is written to the folder."""

    def __init__(
        self, folder: Path, models: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(PeerCache(folder))
        self.config = folder / "config.yaml"
        self._document = {"server": {"host": "127.0.0.1", **(settings or {})}, "models": models}

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        self.config.write_text(json.dumps(self._document, indent=1))
        return self._serve(self.config, ports)


_MIB = 1 << 20
_V2 = frozenset({Api.GRPC, Api.STREAM, Api.SHARED_MEMORY, Api.HTTP_BINARY, Api.HTTP_JSON})
_TRITON_ROLES = (("triton_python_backend_stub", "Python backend stub"), ("bin/tritonserver", "tritonserver"))
_MULTIPROCESSING_ROLE = ("resource_tracker", "multiprocessing resource tracker")


def _version(requirement: str) -> str:
    return requirement.rpartition("=")[2]


class PyTriton(Server):
    """PyTriton: Triton with the callable in a Python process beside it."""

    name = "pytriton"
    title = f"PyTriton {_version(PYTRITON)}"
    apis = _V2 - {Api.SHARED_MEMORY}  # it lets nobody register a region
    roles = (
        *_TRITON_ROLES,
        ("pytriton_models.py", "the program with the callable"),
        _MULTIPROCESSING_ROLE,
        ("multiprocessing", "multiprocessing manager"),
    )
    stop_signal = signal.SIGINT  # after SIGTERM its workspace and its shared memory stay behind

    def prepare(self) -> None:
        self.cache.install("pytriton")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        python, program = self.cache.venv / "bin/python", MODELS_FOLDER / "pytriton_models.py"
        return [str(python), str(program), *map(str, (ports.http, ports.grpc, ports.metrics)), *models]

    def environment(self) -> dict[str, str]:
        return {"PYTRITON_HOME": str(self.cache.folder / "workspaces")}


class PlainTriton(Server):
    """Triton 2.51 with its own Python backend, out of PyTriton's wheel."""

    name = "triton"
    title = "Triton 2.51 Python backend"
    options = frozenset(Option)
    apis = _V2
    roles = _TRITON_ROLES

    def prepare(self) -> None:
        self.cache.install_triton()

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        triton = self.cache.triton
        loaded = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)]
        served = self._serve(
            triton / "bin/tritonserver", MODELS_FOLDER / "triton", triton / "backends", ports
        )
        return [*served, *loaded, *self._option_flags()]

    def _serve(self, program: Path, repository: Path, backends: Path, ports: Ports) -> list[str]:
        """Return the command line that serves a repository on these ports."""
        return [
            str(program),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            "--backend-config=python,shm-default-byte-size=67108864",
            *("--http-address=127.0.0.1", f"--http-port={ports.http}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={ports.grpc}"),
            f"--metrics-port={ports.metrics}",
        ]

    def _option_flags(self) -> list[str]:
        match self.option:
            case None:
                return []
            case Option.TOKEN:
                return [f"--grpc-restricted-protocol=inference:{TOKEN_KEY}={TOKEN}"]
            case Option.TRACED:
                values = (f"triton,file={self.cache.folder / 'triton-trace.json'}", f"level={TRACE_LEVEL}")
                return [f"--trace-config={value}" for value in (*values, f"rate={TRACE_RATE}")]
            case Option.COMPRESSED:
                return ["--grpc-infer-response-compression-level=low"]
            case Option.FORWARDED:
                return [f"--grpc-header-forward-pattern={FORWARDED_HEADER}"]
            case Option.TLS:
                assert self.tls is not None
                files = (f"--grpc-server-cert={self.tls.path}", f"--grpc-server-key={self.tls.key}")
                return ["--grpc-use-ssl=true", *files]

    def environment(self) -> dict[str, str]:
        return {
            "LD_LIBRARY_PATH": str(self.cache.site_packages / "nvidia_pytriton.libs"),
            "PATH": f"{self.cache.venv / 'bin'}:{os.environ['PATH']}",
            # The stub writes no byte code beside the model, which lies in the repository.
            "PYTHONDONTWRITEBYTECODE": "1",
        }


class Mosec(Server):
    """mosec: a front in Rust, the callable in a Python process, one for each of its two paths. It has the
    echo model only.
    """

    name = "mosec"
    title = f"mosec {_version(MOSEC)}"
    apis = frozenset({Api.BYTES, Api.PLAIN_JSON})
    models = frozenset({ECHO})
    largest_nbytes = 8 * _MIB  # its own limit for a body is 10 MiB
    roles = (
        ("mosec_model.py", "the program with the callable"),
        ("bin/mosec ", "front"),
        _MULTIPROCESSING_ROLE,
        ("multiprocessing", "worker"),
    )

    def prepare(self) -> None:
        self.cache.install("mosec")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        python, program = self.cache.folder / "mosec/bin/python", MODELS_FOLDER / "mosec_model.py"
        return [str(python), str(program), "--address", "127.0.0.1", "--port", str(ports.http)]

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.cache.folder / 'mosec' / 'bin'}:{os.environ['PATH']}"}

    def ready_paths(self, models: Sequence[str]) -> list[str]:
        return ["/"]


class MLServer(Server):
    """MLServer: v2 over gRPC and over HTTP as JSON; one inference worker, which is its default.

    Its ModelStreamInfer has other messages than Triton's, so the rows of streams are not for it.
    """

    name = "mlserver"
    title = f"MLServer {_version(MLSERVER)}"
    apis = frozenset({Api.GRPC, Api.HTTP_JSON})
    models = frozenset({ECHO, ECHO_BYTES})
    largest_nbytes = 16 * _MIB  # it makes a Python float of each number: 64 MiB take many seconds
    roles = (("bin/mlserver", "server"), _MULTIPROCESSING_ROLE, ("multiprocessing", "inference worker"))

    def prepare(self) -> None:
        self.cache.install("mlserver")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        folder = MODELS_FOLDER / "mlserver"
        settings = {
            "HOST": "127.0.0.1",
            "HTTP_PORT": ports.http,
            "GRPC_PORT": ports.grpc,
            "METRICS_PORT": ports.metrics,
            "DEBUG": "false",
            "GRPC_MAX_MESSAGE_LENGTH": 2**31 - 1,
            "METRICS_DIR": self.cache.folder / "mlserver-metrics",
            "ENVIRONMENTS_DIR": self.cache.folder / "mlserver-environments",
        }
        program = self.cache.folder / "mlserver/bin/mlserver"
        started = folder / ECHO if tuple(models) == (ECHO,) else folder
        variables = (f"MLSERVER_{name}={value}" for name, value in settings.items())
        return ["/usr/bin/env", *variables, str(program), "start", str(started)]

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(MODELS_FOLDER), "PYTHONDONTWRITEBYTECODE": "1"}

    def ready_paths(self, models: Sequence[str]) -> list[str]:
        return super().ready_paths([name for name in models if name in self.models])


class LitServe(Server):
    """LitServe: FastAPI before a worker process; JSON over HTTP. It has the echo model only."""

    name = "litserve"
    title = f"LitServe {_version(LITSERVE)}"
    apis = frozenset({Api.PLAIN_JSON})
    models = frozenset({ECHO})
    largest_nbytes = _MIB  # as JSON this is 5 MB
    program = "litserve_model.py"
    spins = True  # its API server and its worker poll a queue
    roles = (
        (program, "API server, manager"),  # forks of the program, not told apart
        _MULTIPROCESSING_ROLE,
        ("multiprocessing", "inference worker"),
    )

    def prepare(self) -> None:
        self.cache.install("litserve")

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        python, program = self.cache.folder / "litserve/bin/python", MODELS_FOLDER / self.program
        return [str(python), str(program), str(ports.http)]

    def ready_paths(self, models: Sequence[str]) -> list[str]:
        return ["/health"]


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


#: By name, in the order of the columns.
SERVERS: dict[str, type[Server]] = {
    one.name: one for one in (GpuServe, PyTriton, PlainTriton, Mosec, MLServer, LitServe, Nghttpd)
}
