"""The messages between the reporting process and the processes that send requests, as msgpack. No I/O.

::

    report -> loader   LoaderSetup, then for each level: StartLevel  MeasureLevel  StopLevel
    loader -> report                        LoaderReady  LevelStarted  LevelCounted…  LevelDone
                                            LoaderFailed at any time
"""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import msgpack

from gpuserve.cli.bench.load_generator import CallCounts


@dataclass(frozen=True, slots=True)
class ClientTlsFiles:
    """Paths of PEM files, "" for none; without ``ca`` the system's authorities are trusted."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    verify: bool = True


def tls_context(tls: ClientTlsFiles | None, *, http2: bool) -> ssl.SSLContext | None:
    """Return the TLS context, or None without TLS. Raise OSError or ssl.SSLError for an unreadable file."""
    if tls is None:
        return None
    context = ssl.create_default_context(cafile=tls.ca or None)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.cert:
        context.load_cert_chain(tls.cert, tls.key or None)
    if http2:
        context.set_alpn_protocols(["h2"])
    return context


@dataclass(frozen=True, slots=True)
class LoaderSetup:
    """The server and the content of the calls.

    Args:
        grpc: use gRPC over HTTP/2; otherwise HTTP/1.1.
        head: the header block of every gRPC call; empty for HTTP/1.1, where every request has its own head.
        requests: bodies of gRPC calls, or whole HTTP requests; they are sent in turn.
        in_streams: a call has any number of responses.
        drain_s: time limit of answers after a level.
    """

    host: str
    port: int
    tls: ClientTlsFiles | None
    grpc: bool
    head: bytes
    requests: Sequence[bytes]
    in_streams: bool
    timeout_s: float
    drain_s: float
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class StartLevel:
    """Start a level: ``concurrency`` calls in flight, or ``rate_per_s`` if that is above 0."""

    connections: int
    concurrency: int
    rate_per_s: float
    arrivals: str
    seed: int
    phase: float


@dataclass(frozen=True, slots=True)
class MeasureLevel:
    """End the warm-up and start counting."""


@dataclass(frozen=True, slots=True)
class StopLevel:
    """End the level: send no more requests, and wait for answers."""


@dataclass(frozen=True, slots=True)
class LoaderReady:
    """The process has started and has its setup."""


@dataclass(frozen=True, slots=True)
class LevelStarted:
    """All connections are open and the first requests are sent."""


@dataclass(frozen=True, slots=True)
class LevelCounted:
    """The counts since the last such message."""

    interval: CallCounts


@dataclass(frozen=True, slots=True)
class LevelDone:
    """The level has ended in this process, without requests in flight."""

    interval: CallCounts


@dataclass(frozen=True, slots=True)
class LoaderFailed:
    text: str


# fmt: off
LoaderMessage: TypeAlias = (
    LoaderSetup | StartLevel | MeasureLevel | StopLevel
    | LoaderReady | LevelStarted | LevelCounted | LevelDone | LoaderFailed
)
# fmt: on
_TYPES: dict[str, type[Any]] = {one.__name__: one for one in get_args(LoaderMessage)}


def pack_message(message: LoaderMessage) -> bytes:
    """Return the message as bytes; packed messages need no separator."""
    data: bytes = msgpack.packb((type(message).__name__, dataclasses.asdict(message)))
    return data


def message_unpacker() -> msgpack.Unpacker:
    """Return a parser of packed messages, whose objects go to ``unpack_message``."""
    return msgpack.Unpacker(use_list=False, max_buffer_size=0)


def unpack_message(data: Any) -> LoaderMessage:
    """Return the message of an object of ``message_unpacker``."""
    name, fields = data
    if "interval" in fields:
        fields["interval"] = CallCounts(**fields["interval"])
    if fields.get("tls"):
        fields["tls"] = ClientTlsFiles(**fields["tls"])
    message: LoaderMessage = _TYPES[name](**fields)
    return message
