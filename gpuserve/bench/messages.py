"""What the process that makes the report and those that load say to each other, as msgpack. No I/O.

::

    report -> load   Setup, then for each level: Start  Measure  Stop
    load -> report                         Ready  Started       Counted…  Done       Failed at any time
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack

from gpuserve.bench.samples import Interval


@dataclass(frozen=True, slots=True)
class Encryption:
    """TLS: PEM files, "" for none. Without ``ca`` the system's authorities count."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    """Where the calls go, and what they are.

    Args:
        grpc: gRPC over HTTP/2; else HTTP/1.1.
        head: the header block of every gRPC call; empty for HTTP/1.1, where a request has its own.
        in_streams: a call has any number of responses.
        drain_s: how long answers are awaited after a level.
    """

    host: str
    port: int
    tls: Encryption | None
    grpc: bool
    head: bytes
    requests: list[bytes]
    in_streams: bool
    timeout_s: float
    drain_s: float
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a level: ``concurrency`` in flight, or ``rate_per_s`` where that is above 0."""

    connections: int
    concurrency: int
    rate_per_s: float
    arrivals: str
    seed: int
    phase: float


@dataclass(frozen=True, slots=True)
class Measure:
    """The warm-up is over."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The level is over."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The process is there."""


@dataclass(frozen=True, slots=True)
class Started:
    """All connections are open and the first requests are on their way."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What has come in a stretch of time."""

    interval: Interval


@dataclass(frozen=True, slots=True)
class Done:
    """The level is over here; nothing of it is in flight."""

    interval: Interval


@dataclass(frozen=True, slots=True)
class Failed:
    """The process cannot go on."""

    text: str


Message: TypeAlias = Setup | Start | Measure | Stop | Ready | Started | Counted | Done | Failed
_TYPES: dict[str, type[Any]] = {
    one.__name__: one for one in (Setup, Start, Measure, Stop, Ready, Started, Counted, Done, Failed)
}


def packed(message: Message) -> bytes:
    """The message as bytes; several in a row can be told apart."""
    data: bytes = msgpack.packb((type(message).__name__, dataclasses.asdict(message)))
    return data


def unpacker() -> msgpack.Unpacker:
    """For a stream of messages; each that it gives is for ``unpacked``."""
    return msgpack.Unpacker(use_list=True, max_buffer_size=0)


def unpacked(data: Any) -> Message:
    """One message."""
    name, fields = data
    if "interval" in fields:
        fields["interval"] = _interval(fields["interval"])
    if fields.get("tls"):
        fields["tls"] = Encryption(**fields["tls"])
    message: Message = _TYPES[name](**fields)
    return message


def _interval(fields: dict[str, Any]) -> Interval:
    failures = {kind: (count, text) for kind, (count, text) in fields.pop("failures").items()}
    pairs: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Interval(failures=failures, **pairs)
