"""What a server is to the benchmarks. Nothing is started here.

All get the same models, loopback and ports of their own; everything else stays at the server's defaults, but
for limits that a row would run into.
"""

from __future__ import annotations

import abc
import copy
import enum
import http.client
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from benchmarks import processes
from benchmarks.peers import PeerCache
from benchmarks.processes import is_left

_SUBJECT = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650")


class Certificate(NamedTuple):
    path: Path
    key: Path


def certificate(folder: Path) -> Certificate:
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    if not made.path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        files = ("-keyout", str(made.key), "-out", str(made.path))
        command = ("openssl", "req", "-x509", *_KEY, *_SUBJECT, *files)
        subprocess.run(command, check=True, capture_output=True)
    return made


ECHO, ECHO_READ_ONLY, ECHO_BYTES, TOKENS = "echo", "echo-read-only", "echo-bytes", "tokens"
ECHO_UNBATCHED, EIGHT_INPUTS = "echo-unbatched", "eight-inputs"
#: Only in the repository of Triton, whose models this server serves as well.
CHAIN = "chain"
MODELS = (ECHO, ECHO_READ_ONLY, ECHO_BYTES, ECHO_UNBATCHED, TOKENS, EIGHT_INPUTS)
MODELS_FOLDER = Path(__file__).parent.parent / "models"


class Api(enum.Enum):
    """A way in which a server can be asked."""

    GRPC = "v2 over gRPC"
    STREAM = "Triton's ModelStreamInfer"
    SHARED_MEMORY = "Triton's system shared memory"
    HTTP_BINARY = "v2 over HTTP with the binary extension"
    HTTP_JSON = "v2 over HTTP, JSON only"
    BYTES = "the bytes of one tensor over HTTP, and nothing else"
    PLAIN_JSON = "a JSON object of lists over HTTP, not v2"
    BODY_ECHO = "any body over HTTP/2; the answer is the same body"


class Option(enum.Enum):
    """What a server is started with for some rows, in a process of its own. The value names its log."""

    TOKEN = "token"  #: inference is for those who show it
    TRACED = "traced"  #: one in a thousand requests, to a file
    COMPRESSED = "compressed"  #: responses over gRPC, at the lowest level
    FORWARDED = "forwarded"  #: one header becomes a parameter of the request
    TLS = "tls"  #: on the port of gRPC

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What goes with each request in these rows, also to a server that has been told nothing of it."""
        return _HEADERS.get(self, ())


TOKEN_KEY, TOKEN, FORWARDED_HEADER = "triton-access-token", "benchmark-token", "x-tenant"
#: Of a trace; one in so many requests is traced.
TRACE_LEVEL, TRACE_RATE = "TIMESTAMPS", 1000
_HEADERS = {
    Option.TOKEN: ((f"triton-grpc-protocol-{TOKEN_KEY}", TOKEN),),
    Option.COMPRESSED: (("grpc-accept-encoding", "gzip"),),
    Option.FORWARDED: ((FORWARDED_HEADER, "benchmark"),),
}


class Kind(enum.Enum):
    """The kind of a server in comparisons."""

    OURS = enum.auto()
    BASELINE = enum.auto()  #: this server without the option of a row
    PEER = enum.auto()
    FLOOR = enum.auto()  #: has no model and does not speak v2: what is left of it is the cost of a server


@dataclass(frozen=True, slots=True)
class Ports:
    """Where one server listens on 127.0.0.1."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> Ports:
        """Three ports that nobody listens on at this moment, and that no connection of a client gets, as
        ports above 32,767 do by default.
        """
        found: list[int] = []
        while len(found) < 3:
            port = random.randrange(20_000, 32_768)
            with suppress(OSError), socket.create_server(("0.0.0.0", port)):
                found.append(port)
        return cls(*found)


class Server(abc.ABC):
    """How one server is had and started. ``name`` is what --servers takes, ``title`` what the table shows.

    ``roles``: the first word that is found in the command line of a process names its role. A row with a
    tensor over ``largest_nbytes`` is not for it, nor one with an option that is not among ``options``.
    ``option`` is the one that it is started with. One that ``spins`` uses CPU time while nobody asks it; it
    is paused while others are measured.
    """

    name: str
    title: str
    kind: ClassVar[Kind] = Kind.PEER
    apis: ClassVar[frozenset[Api]]
    models: ClassVar[frozenset[str]] = frozenset(MODELS)
    largest_nbytes: ClassVar[int] = 1 << 31
    roles: ClassVar[tuple[tuple[str, str], ...]] = ()
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    spins: ClassVar[bool] = False
    options: ClassVar[frozenset[Option]] = frozenset()
    option: Option | None = None

    def __init__(self, cache: PeerCache) -> None:
        self.cache = cache

    def started_with(self, option: Option | None) -> Self:
        """The same server, to be started with an option."""
        other = copy.copy(self)
        other.option = option
        return other

    @property
    def log_name(self) -> str:
        """The name of its log, which no other server has that is up at the same time."""
        return self.name if self.option is None else f"{self.name}-{self.option.value}"

    @property
    def tls(self) -> Certificate | None:
        """The certificate that it shows over gRPC, if any; it is made here where there is none."""
        return certificate(self.cache.folder / "tls") if self.option is Option.TLS else None

    @abc.abstractmethod
    def prepare(self) -> None:
        """Install what is missing. Raises ServerMissing: it cannot be had here."""

    @abc.abstractmethod
    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        """The command line that serves these models on these ports."""

    def environment(self) -> dict[str, str]:
        """Variables that the command needs besides those of this process."""
        return {}

    def ready_paths(self, models: Sequence[str]) -> list[str]:
        """What answers 200 over HTTP when the server is ready. None: it is when its port is open."""
        return ["/v2/health/ready", *(f"/v2/models/{name}/ready" for name in models)]

    def role(self, command: str) -> str:
        """What a process of this server does, by its command line; the program where that is not known."""
        program = command.partition(" ")[0].rpartition("/")[2]
        return next((role for mark, role in self.roles if mark in command), program)


_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.005


class ServerFailed(Exception):
    """A server that is installed did not come up or did not answer as it should; the text has its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers. Borrowed from ``running``, which ends it."""

    server: Server
    ports: Ports
    pid: int
    ready_s: float  #: from the start of the command until the server and its models said ready


@contextmanager
def running(
    server: Server, logs: Path, models: Sequence[str] = MODELS, ready_timeout_s: float = _READY_TIMEOUT_S
) -> Iterator[RunningServer]:
    """Start a prepared server with these models, wait until it is ready, and end all of it afterwards. Raises
    ServerFailed: it ended, or was not ready in time.
    """
    ports = Ports.free()
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{server.log_name}.log"
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
        if not _is_ready_within(ready_timeout_s, server, process, ports, models):
            how = f"was not ready in {ready_timeout_s:.0f} s"
            if process.poll() is not None:
                how = f"ended with {process.returncode}"
            raise ServerFailed(f"{server.title} {how}:\n{_tail(log)}")
        yield RunningServer(server, ports, process.pid, time.perf_counter() - began)
    finally:
        with _signals_held_back():
            processes.resume(process.pid)
            _stop(process, server.stop_signal)


def _is_ready_within(
    seconds: float, server: Server, process: subprocess.Popen[bytes], ports: Ports, models: Sequence[str]
) -> bool:
    """False where it has ended, too."""
    deadline = time.monotonic() + seconds
    while not _is_ready(server, ports, models):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_ready(server: Server, ports: Ports, models: Sequence[str]) -> bool:
    paths = server.ready_paths(models)
    return all(_says_ok(ports.http, path) for path in paths) if paths else _takes_connections(ports.grpc)


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


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
    while any(map(is_left, members.values())) and time.monotonic() < deadline:
        process.poll()
        members |= {one.pid: one for one in processes.tree(process.pid)}  # it may have been starting some
        time.sleep(_POLL_S)
    for member in filter(is_left, members.values()):
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


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
