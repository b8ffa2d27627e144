"""The messages between the process that makes the report and those that send requests, as msgpack. No I/O.

::

    report -> load   Setup, then for each level: Start  Measure  Stop
    load -> report                         Ready  Started       Counted…  Done       Failed at any time
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import msgpack

from gpuserve.bench.calls.samples import Interval


@dataclass(frozen=True, slots=True)
class Encryption:
    """Paths of PEM files, "" for none; without ``ca`` the system's authorities are trusted."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    verify: bool = True


@dataclass(frozen=True, slots=True)
class LoaderSetup:
    """Which server the calls go to, and what they hold.

    Args:
        grpc: gRPC over HTTP/2; else HTTP/1.1.
        head: the header block of every gRPC call; empty for HTTP/1.1, where a request has its own.
        requests: bodies of gRPC calls, or whole HTTP requests; they are sent in turn.
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
class StartLevel:
    """Begin a level: ``concurrency`` calls in flight, or ``rate_per_s`` where that is above 0."""

    connections: int
    concurrency: int
    rate_per_s: float
    arrivals: str
    seed: int
    phase: float


@dataclass(frozen=True, slots=True)
class MeasureLevel:
    """End the warm-up and begin to count."""


@dataclass(frozen=True, slots=True)
class StopLevel:
    """End the level: send no more, and wait for answers."""


@dataclass(frozen=True, slots=True)
class LoaderReady:
    """The process has started and has its setup."""


@dataclass(frozen=True, slots=True)
class LevelStarted:
    """All connections are open and the first requests are on their way."""


@dataclass(frozen=True, slots=True)
class LevelCounted:
    """What was counted since the last such message."""

    interval: Interval


@dataclass(frozen=True, slots=True)
class LevelDone:
    """The level has ended in this process, and nothing of it is in flight."""

    interval: Interval


@dataclass(frozen=True, slots=True)
class LoaderFailed:
    text: str


LoaderMessage: TypeAlias = (
    LoaderSetup
    | StartLevel
    | MeasureLevel
    | StopLevel
    | LoaderReady
    | LevelStarted
    | LevelCounted
    | LevelDone
    | LoaderFailed
)
_TYPES: dict[str, type[Any]] = {one.__name__: one for one in get_args(LoaderMessage)}


def packed(message: LoaderMessage) -> bytes:
    """The message as bytes, which may follow each other without a separator."""
    data: bytes = msgpack.packb((type(message).__name__, dataclasses.asdict(message)))
    return data


def unpacker() -> msgpack.Unpacker:
    """A reader of packed messages: each object that it gives goes to ``unpacked``."""
    return msgpack.Unpacker(use_list=True, max_buffer_size=0)


def unpacked(data: Any) -> LoaderMessage:
    """The message that an object of ``unpacker`` stands for."""
    name, fields = data
    if "interval" in fields:
        fields["interval"] = _interval(fields["interval"])
    if fields.get("tls"):
        fields["tls"] = Encryption(**fields["tls"])
    message: LoaderMessage = _TYPES[name](**fields)
    return message


def _interval(fields: dict[str, Any]) -> Interval:
    failures = {kind: (count, text) for kind, (count, text) in fields.pop("failures").items()}
    pairs: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Interval(failures=failures, **pairs)
