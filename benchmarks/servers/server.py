"""What a server is to the benchmarks. Nothing is started here.

All get the same models, loopback and ports of their own; everything else stays at the server's defaults, but
for limits that a row would run into.
"""

from __future__ import annotations

import abc
import copy
import enum
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from benchmarks.peers import PeerCache
from benchmarks.servers.certificate import Certificate, certificate

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
        """Three ports that nobody listens on at this moment."""
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        return cls(*ports)


class Server(abc.ABC):
    """How one server is had and started. ``name`` is what --servers takes, ``title`` what the table shows.

    ``roles``: the first word that is found in the command line of a process names its role. A row with a
    tensor over ``largest_nbytes`` is not for it, nor one with an option that is not among ``options``.
    ``option`` is the one that it is started with.
    """

    name: str
    title: str
    kind: ClassVar[Kind] = Kind.PEER
    apis: ClassVar[frozenset[Api]]
    models: ClassVar[frozenset[str]] = frozenset(MODELS)
    largest_nbytes: ClassVar[int] = 1 << 31
    roles: ClassVar[tuple[tuple[str, str], ...]] = ()
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
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
        """What answers 200 over HTTP when the server is ready. None: it is when its port is open."""
        return ["/v2/health/ready", *(f"/v2/models/{name}/ready" for name in models)]

    def role(self, command: str) -> str:
        """What a process of this server does, by its command line; the program where that is not known."""
        program = command.partition(" ")[0].rpartition("/")[2]
        return next((role for mark, role in self.roles if mark in command), program)
