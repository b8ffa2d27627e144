"""How each server is started and stopped: one class a server, and ``RunningServer`` for what was started.

All get the same models, loopback and ports of their own; everything else stays at the server's defaults.
"""

from __future__ import annotations

import abc
import enum
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import processes
from benchmarks.peers import MOSEC, PYTRITON, PeerCache, ServerMissing
from benchmarks.processes import Process

ECHO, ECHO_READ_ONLY, TOKENS = "echo", "echo-read-only", "tokens"
MODELS = (ECHO, ECHO_READ_ONLY, TOKENS)
_MODELS_FOLDER = Path(__file__).parent / "models"
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.005


class ServerFailed(Exception):
    """A server that is installed did not come up or did not answer as it should; the text has its log."""


class Api(enum.Enum):
    """What a server can be asked in."""

    V2 = "the Open Inference Protocol, over gRPC and HTTP"
    RAW = "the bytes of one tensor over HTTP, and nothing else"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where one server listens on 127.0.0.1."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> Ports:
        """Three ports that nobody listens on at this moment."""
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        return cls(*ports)


class Server(abc.ABC):
    """How one server is had and started. ``name`` is what --servers takes, ``title`` what the table shows."""

    name: str
    title: str
    api = Api.V2
    stop_signal = signal.SIGTERM

    def __init__(self, cache: PeerCache) -> None:
        self._cache = cache

    @abc.abstractmethod
    def prepare(self) -> None:
        """Install what is missing.

        Raises:
            ServerMissing: it cannot be had here.
        """

    @abc.abstractmethod
    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        """The command line that serves these models on these ports."""

    def environment(self) -> dict[str, str]:
        """Variables that the command needs besides those of this process."""
        return {}

    def ready_paths(self, models: Sequence[str]) -> list[str]:
        """What answers 200 over HTTP when the server is ready."""
        return ["/v2/health/ready", *(f"/v2/models/{name}/ready" for name in models)]


class GpuServe(Server):
    """This server, out of the environment that runs the benchmarks."""

    name = "gpuserve"
    title = "gpuserve"

    @property
    def _program(self) -> Path:
        return Path(sys.executable).parent / "gpuserve"

    def prepare(self) -> None:
        try:
            self.title = f"gpuserve {version('gpuserve')}"
        except PackageNotFoundError:
            raise ServerMissing(f"gpuserve is not installed in {sys.prefix}") from None

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        config = _MODELS_FOLDER / ("echo.yaml" if tuple(models) == (ECHO,) else "all.yaml")
        flags = ["--http-port", ports.http, "--grpc-port", ports.grpc, "--metrics-port", ports.metrics]
        return [str(self._program), "serve", str(config), *map(str, flags)]


class PyTriton(Server):
    """PyTriton: Triton with the callable in a Python process beside it."""

    name = "pytriton"
    title = f"PyTriton {PYTRITON.rpartition('=')[2]}"
    stop_signal = signal.SIGINT  # after SIGTERM its workspace and its shared memory stay behind

    def prepare(self) -> None:
        self._cache.install_pytriton()

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        python, program = self._cache.venv / "bin/python", _MODELS_FOLDER / "pytriton_models.py"
        return [str(python), str(program), *map(str, (ports.http, ports.grpc, ports.metrics)), *models]

    def environment(self) -> dict[str, str]:
        return {"PYTRITON_HOME": str(self._cache.folder / "workspaces")}


class PlainTriton(Server):
    """Triton 2.51 with its own Python backend, out of PyTriton's wheel."""

    name = "triton"
    title = "Triton 2.51 Python backend"

    def prepare(self) -> None:
        self._cache.install_triton()

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        triton = self._cache.triton
        return [
            str(triton / "bin/tritonserver"),
            f"--model-repository={_MODELS_FOLDER / 'triton'}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in models),
            f"--backend-directory={triton / 'backends'}",
            "--backend-config=python,shm-default-byte-size=67108864",
            *("--http-address=127.0.0.1", f"--http-port={ports.http}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={ports.grpc}"),
            f"--metrics-port={ports.metrics}",
        ]

    def environment(self) -> dict[str, str]:
        return {
            "LD_LIBRARY_PATH": str(self._cache.site_packages / "nvidia_pytriton.libs"),
            "PATH": f"{self._cache.venv / 'bin'}:{os.environ['PATH']}",
            # The stub writes no byte code beside the model, which lies in the repository.
            "PYTHONDONTWRITEBYTECODE": "1",
        }


class Mosec(Server):
    """mosec: a front in Rust, the callable in a Python process. It has the echo model only."""

    name = "mosec"
    title = f"mosec {MOSEC.rpartition('=')[2]}"
    api = Api.RAW

    def prepare(self) -> None:
        self._cache.install_mosec()

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        python, program = self._cache.mosec / "bin/python", _MODELS_FOLDER / "mosec_model.py"
        return [str(python), str(program), "--address", "127.0.0.1", "--port", str(ports.http)]

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self._cache.mosec / 'bin'}:{os.environ['PATH']}"}

    def ready_paths(self, models: Sequence[str]) -> list[str]:
        return ["/"]


SERVERS: dict[str, type[Server]] = {one.name: one for one in (GpuServe, PyTriton, PlainTriton, Mosec)}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers. Borrowed from ``running``, which ends it."""

    server: Server
    ports: Ports
    pid: int
    ready_s: float  #: from the start of the command until the server and its models said ready


@contextmanager
def running(server: Server, logs: Path, models: Sequence[str] = MODELS) -> Iterator[RunningServer]:
    """Start a prepared server with these models, wait until it is ready, and end all of it afterwards.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    ports = Ports.free()
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{server.name}.log"
    with log.open("wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            server.command(ports, models),
            env={**os.environ, **server.environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the benchmark, which then ends the server in order
        )
    try:
        _wait_until_ready(server, process, ports, models, log)
        yield RunningServer(server, ports, process.pid, time.perf_counter() - began)
    finally:
        with _signals_held_back():
            _stop(process, server.stop_signal)


def _wait_until_ready(
    server: Server, process: subprocess.Popen[bytes], ports: Ports, models: Sequence[str], log: Path
) -> None:
    paths = server.ready_paths(models)
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not all(_says_ok(ports.http, path) for path in paths):
        if process.poll() is not None:
            raise ServerFailed(f"{server.title} ended with {process.returncode}:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerFailed(f"{server.title} was not ready in {_READY_TIMEOUT_S:.0f} s:\n{_tail(log)}")
        time.sleep(_POLL_S)


def _says_ok(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals) -> None:
    """The signal to the first process; what of the tree is left after the timeout is killed."""
    members = {one.pid: one for one in processes.tree(process.pid)}
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    process.send_signal(stop_signal)
    while any(map(_is_left, members.values())) and time.monotonic() < deadline:
        process.poll()
        members |= {one.pid: one for one in processes.tree(process.pid)}  # it may have been starting some
        time.sleep(_POLL_S)
    for member in filter(_is_left, members.values()):
        os.kill(member.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """SIGINT and SIGTERM wait: a server that is half stopped would stay behind.

    By handlers, not by a mask: gRPC's threads would take the signal, and Python hand it to this one.
    """
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
    if caught:
        signal.raise_signal(caught[0])


def _is_left(member: Process) -> bool:
    now = Process.read(member.pid)
    return now is not None and now.started_ticks == member.started_ticks


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
