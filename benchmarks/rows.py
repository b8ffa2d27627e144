"""The lines of the table: what is sent, what is read off a run, and the ratio that is to be reached."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from benchmarks.load import (
    FirstResponseLoad,
    GrpcLoad,
    HttpLoad,
    InStreamLoad,
    Load,
    LoadResult,
    SharedMemoryLoad,
)
from benchmarks.payloads import EchoInStreamPayload, EchoPayload, SharedMemoryPayload, TokensPayload
from benchmarks.servers import ECHO, ECHO_READ_ONLY

_SMALL = EchoPayload(64)
_LARGE = EchoPayload(1 << 20)
_STREAM = TokensPayload(256)


class Measure(enum.Enum):
    """What a row shows; the value is its unit."""

    THROUGHPUT = "req/s"
    TOKENS = "tokens/s"  #: responses of all streams together
    LATENCY = "ms"  #: the median over the requests of one run
    BANDWIDTH = "MB/s"  #: tensor bytes in one direction; the same number comes back


@dataclass(frozen=True, slots=True)
class Target:
    """The ratio ours / theirs that is to be reached: at least, or for a latency at most."""

    ratio: float
    at_most: bool = False

    def met_by(self, ratio: float) -> bool:
        """Whether a measured ratio reaches it."""
        return ratio <= self.ratio if self.at_most else ratio >= self.ratio

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.ratio:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line. ``targets`` by the peer's name."""

    name: str
    title: str
    load: Load
    measure: Measure
    targets: dict[str, Target] = field(default_factory=dict)

    def value(self, result: LoadResult) -> float:
        """What the row shows of one run, in the unit of its measure."""
        match self.measure:
            case Measure.THROUGHPUT | Measure.TOKENS:
                return result.answers_per_s
            case Measure.BANDWIDTH:
                assert isinstance(self.load.payload, EchoPayload), f"{self.name}: the load has no size"
                return result.answers_per_s * self.load.payload.nbytes / 1e6
            case Measure.LATENCY:
                assert result.median_latency_s is not None, f"{self.name}: the load keeps no latencies"
                return result.median_latency_s * 1e3


_SMALL_TARGETS = {"pytriton": Target(4.0), "triton": Target(1.2)}
_LARGE_TARGETS = {"pytriton": Target(2.0), "triton": Target(0.9)}
_TOKENS_TARGETS = {"pytriton": Target(3.0)}
_FIRST_TARGETS = {"pytriton": Target(0.33, at_most=True)}


def _shared_memory_row(name: str, size: str, nbytes: int, model: str, at_most: float) -> Row:
    inputs = "read-only" if model == ECHO_READ_ONLY else "writable"
    return Row(
        name,
        f"gRPC {size} in shared memory, {inputs} inputs, one in flight, median",
        SharedMemoryLoad(SharedMemoryPayload(nbytes, model)),
        Measure.LATENCY,
        {"triton": Target(at_most, at_most=True)},
    )


ROWS = (
    Row(
        "grpc-64-8x16",
        "gRPC 64 B, 128 in flight on 8 connections",
        GrpcLoad(_SMALL, connections=8, streams=16),
        Measure.THROUGHPUT,
        _SMALL_TARGETS,
    ),
    # One connection lets a server send many answers with one system call: a case of its own.
    Row(
        "grpc-64-1x128",
        "gRPC 64 B, 128 in flight on 1 connection",
        GrpcLoad(_SMALL, connections=1, streams=128),
        Measure.THROUGHPUT,
        _SMALL_TARGETS,
    ),
    Row(
        "grpc-64-1",
        "gRPC 64 B, one in flight, median",
        GrpcLoad(_SMALL, connections=1, streams=1, latency=True),
        Measure.LATENCY,
        {"pytriton": Target(0.3, at_most=True)},
    ),
    Row(
        "http-64-64",
        "HTTP binary 64 B, 64 connections",
        HttpLoad(_SMALL, connections=64),
        Measure.THROUGHPUT,
        {"triton": Target(1.5), "mosec": Target(1.0)},
    ),
    Row(
        "stream-64-64",
        "gRPC 64 B, 64 in flight inside one stream",
        InStreamLoad(EchoInStreamPayload(64), in_flight=64),
        Measure.THROUGHPUT,
        {"triton": Target(1.5)},
    ),
    _shared_memory_row("shm-1m-read-only", "1 MiB", 1 << 20, ECHO_READ_ONLY, 0.7),
    _shared_memory_row("shm-1m", "1 MiB", 1 << 20, ECHO, 0.9),
    _shared_memory_row("shm-16m-read-only", "16 MiB", 1 << 24, ECHO_READ_ONLY, 0.35),
    _shared_memory_row("shm-16m", "16 MiB", 1 << 24, ECHO, 0.75),
    Row(
        "grpc-1m-1",
        "gRPC 1 MiB, one in flight",
        GrpcLoad(_LARGE, connections=1, streams=1),
        Measure.BANDWIDTH,
        _LARGE_TARGETS,
    ),
    Row(
        "grpc-1m-8",
        "gRPC 1 MiB, 8 in flight on 8 connections",
        GrpcLoad(_LARGE, connections=8, streams=1),
        Measure.BANDWIDTH,
        _LARGE_TARGETS,
    ),
    Row(
        "tokens-1",
        "gRPC stream of 256 tokens, one at a time",
        GrpcLoad(_STREAM, connections=1, streams=1),
        Measure.TOKENS,
        _TOKENS_TARGETS,
    ),
    Row(
        "tokens-16",
        "gRPC streams of 256 tokens, 16 at once",
        GrpcLoad(_STREAM, connections=1, streams=16),
        Measure.TOKENS,
        _TOKENS_TARGETS,
    ),
    Row(
        "first-1",
        "first token of a stream of 256, one at a time, median",
        FirstResponseLoad(_STREAM, streams=1),
        Measure.LATENCY,
        _FIRST_TARGETS,
    ),
    Row(
        "first-16",
        "first token of a stream of 256, 16 at once, median",
        FirstResponseLoad(_STREAM, streams=16),
        Measure.LATENCY,
        _FIRST_TARGETS,
    ),
)
