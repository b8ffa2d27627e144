"""The lines of the table: what is sent, what is read off a run, and the ratios that are to be reached."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial

from benchmarks import payloads
from benchmarks.figures import Goal
from benchmarks.load import (
    BesideLoad,
    FirstResponseLoad,
    GrpcLoad,
    GrpcStreamLoad,
    HttpLoad,
    InStreamLoad,
    JsonLoad,
    Load,
    LoadResult,
    SharedMemoryLoad,
)
from benchmarks.payloads import (
    EchoFractionsPayload,
    EchoInStreamPayload,
    EchoPayload,
    Payload,
    SharedMemoryPayload,
    TokensPayload,
)
from benchmarks.servers.server import ECHO, ECHO_READ_ONLY, Option

_SMALL = EchoPayload(64)
_LARGE = EchoPayload(1 << 20)
_STREAM = TokensPayload(256)
_GRPC_LARGEST = GrpcLoad(EchoPayload(1 << 26), 1, 1)
_ONE_CONNECTION = "gRPC 64 B, 128 in flight on 1 connection"
_EIGHT_LARGE = "gRPC 1 MiB, 8 in flight on 8 connections"
_IN_STREAM = "gRPC 64 B, 64 in flight inside one stream"
_DECOUPLED = "gRPC decoupled, 256 responses a stream"
_FIRST = "first of 256 decoupled responses"
#: Tensors from this size on have the floor ``memcpy``.
COPIED_NBYTES = 1 << 20
#: Named in a goal: this server without the option of the row.
WITHOUT = "without"


class Measure(enum.Enum):
    """What a row shows; the value is its unit."""

    THROUGHPUT = "req/s"
    TOKENS = "responses/s"  #: of all streams together
    LATENCY = "ms"  #: the median over the requests of one run
    TAIL = "ms at p99"
    BANDWIDTH = "MB/s"  #: tensor bytes in one direction; the same number comes back

    @property
    def less_is_better(self) -> bool:
        return self in {Measure.LATENCY, Measure.TAIL}


@dataclass(frozen=True, slots=True)
class Goals:
    """The ratios ours / theirs that a row is to reach: against the best of its peers, whichever that is, and
    against some by name. A row with an option is measured on this server without it where ``WITHOUT`` is
    named.
    """

    best: Goal | None = None
    named: tuple[tuple[str, Goal], ...] = ()


def _at_least(best: float | None = None, *, at_most: bool = False, **named: float) -> Goals:
    targets = tuple((name, Goal(ratio, not at_most)) for name, ratio in named.items())
    return Goals(None if best is None else Goal(best, not at_most), targets)


_at_most = partial(_at_least, at_most=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One line. No run is shorter than ``least_s``: in less, some servers do not end a single request."""

    name: str
    title: str
    load: Load
    measure: Measure
    goals: Goals = Goals()
    least_s: float = 0.0

    @property
    def has_baseline(self) -> bool:
        """Whether it is measured on this server without its option as well."""
        return any(name == WITHOUT for name, _ in self.goals.named)

    def value(self, result: LoadResult) -> float:
        match self.measure:
            case Measure.THROUGHPUT | Measure.TOKENS:
                return result.answers_per_s
            case Measure.BANDWIDTH:
                return result.answers_per_s * self.load.payload.nbytes / 1e6
            case Measure.LATENCY:
                assert result.median_latency_s is not None, f"{self.name}: the load keeps no latencies"
                return result.median_latency_s * 1e3
            case Measure.TAIL:
                assert result.p99_latency_s is not None, f"{self.name}: the load keeps no latencies"
                return result.p99_latency_s * 1e3

    @property
    def copied_nbytes(self) -> int | None:
        """The size of the tensor where moving it is most of the work, so that memcpy is a floor."""
        nbytes = self.load.payload.nbytes
        return nbytes if nbytes >= COPIED_NBYTES and self.measure is not Measure.THROUGHPUT else None


THROUGHPUT, TOKENS, LATENCY, _, BANDWIDTH = Measure
_GRPC_1, _GRPC_128 = GrpcLoad(_SMALL, 1, 1, latency=True), GrpcLoad(_SMALL, 8, 16)
# Goals are ratios to the best peer. A peer with a goal of its own has it because the issue of speed names it.
_SMALL_GOALS = _at_least(2.0, pytriton=7.0)
_LARGE_GOALS = _at_least(1.15, pytriton=3.0)
_TOKENS_GOALS = _at_least(1.5, pytriton=5.0)
_FIRST_GOALS = _at_most(0.8)
# Against mosec where that is the best; another one that is better has to be beaten by as much.
_HTTP_GOALS = _at_least(1.2, triton=1.8, mosec=1.2, pytriton=8.0)


def _grpc_row(name: str, title: str, payload: Payload, goal: float, streams: int = 16) -> Row:
    title = f"{title}, {8 * streams} in flight on 8 connections"
    return Row(name, title, GrpcLoad(payload, 8, streams), THROUGHPUT, _at_least(goal))


def _shared_memory_row(name: str, size: str, nbytes: int, model: str, at_most: float) -> Row:
    inputs = "read-only" if model == ECHO_READ_ONLY else "writable"
    title = f"gRPC {size} in shared memory, {inputs} inputs, one in flight, median"
    load = SharedMemoryLoad(SharedMemoryPayload(nbytes, model))
    return Row(name, title, load, LATENCY, _at_most(at_most))


def _json_row(n: int, connections: int, at_least: float) -> Row:
    title = f"HTTP JSON, {n:,} floats in and out, {connections} connections"
    load = JsonLoad(EchoFractionsPayload(4 * n), connections)
    return Row(f"json-{n}", title, load, THROUGHPUT, _at_least(triton=at_least))


def _option_row(option: Option, title: str, goals: Goals) -> Row:
    title = f"{title}, gRPC 64 B, 128 in flight on 8 connections"
    return Row(option.value, title, GrpcLoad(_SMALL, 8, 16, option=option), THROUGHPUT, goals)


def _beside_rows(name: str, title: str, other: Load) -> tuple[Row, Row]:
    load = BesideLoad(payloads.eight_inputs(64), other=other)
    title = f"gRPC, eight inputs of 64 B, one in flight, beside {title}"
    goals = _at_most(triton=0.8)
    return (
        Row(name, f"{title}, median", load, LATENCY, goals),
        Row(f"{name}-p99", f"{title}, p99", load, Measure.TAIL, goals),
    )


def _stream_row(name: str, title: str, load: Load, goals: Goals) -> Row:
    return Row(name, title, load, LATENCY if name.startswith("first") else TOKENS, goals)


ROWS = (
    Row("grpc-64-1", "gRPC 64 B, one in flight, median", _GRPC_1, LATENCY, _at_most(0.9, pytriton=0.2)),
    Row("grpc-64-8x16", "gRPC 64 B, 128 in flight on 8 connections", _GRPC_128, THROUGHPUT, _SMALL_GOALS),
    # One connection lets a server send many answers with one system call: a case of its own.
    Row("grpc-64-1x128", _ONE_CONNECTION, GrpcLoad(_SMALL, 1, 128), THROUGHPUT, _SMALL_GOALS),
    _grpc_row("grpc-4k", "gRPC 4 KiB", EchoPayload(4 << 10), 1.5),
    _grpc_row("grpc-16k", "gRPC 16 KiB", EchoPayload(16 << 10), 1.5, streams=8),
    _grpc_row("grpc-64k", "gRPC 64 KiB", EchoPayload(64 << 10), 1.5, streams=4),
    _grpc_row("grpc-128k", "gRPC 128 KiB", EchoPayload(128 << 10), 1.5, streams=2),
    _grpc_row("grpc-256k", "gRPC 256 KiB", EchoPayload(256 << 10), 1.5, streams=1),
    _grpc_row("inputs-8", "gRPC, eight inputs of 64 B", payloads.eight_inputs(64), 1.5),
    _grpc_row("rows-32", "gRPC, 32 rows of 64 B", payloads.echo_rows(32, 64), 1.5),
    _option_row(Option.TLS, "TLS", _at_least(2.0)),
    _option_row(Option.TOKEN, "access token", _at_least(2.0, without=0.9)),
    _option_row(Option.TRACED, "one in 1,000 requests traced", _at_least(2.0, without=0.95)),
    _option_row(Option.COMPRESSED, "compressed responses", _at_least(2.0, without=0.6)),
    _option_row(Option.FORWARDED, "one header forwarded", _at_least(2.0, without=0.95)),
    Row("http-64-64", "HTTP binary 64 B, 64 connections", HttpLoad(_SMALL, 64), THROUGHPUT, _HTTP_GOALS),
    Row(
        "http-64-64-close",
        "HTTP binary 64 B, 64 in flight, a connection for each request",
        HttpLoad(_SMALL, 64, close=True),
        THROUGHPUT,
        _at_least(triton=1.2),
    ),
    _json_row(16, connections=64, at_least=1.5),
    _json_row(1000, connections=16, at_least=3.0),
    # An image of 224 x 224 pixels in three colours.
    _json_row(150_528, connections=2, at_least=4.0),
    *_beside_rows("mixed", "600 KiB, 12 in flight", GrpcLoad(EchoPayload(600 << 10), 12, 1)),
    *_beside_rows("mixed-json", "150,528 floats in JSON", JsonLoad(EchoFractionsPayload(602_112), 2)),
    *_beside_rows("flood", "1,024 in flight on 32 connections", GrpcLoad(_SMALL, 32, 32)),
    Row("stream-64-64", _IN_STREAM, InStreamLoad(EchoInStreamPayload(64), 64), THROUGHPUT, _at_least(1.5)),
    Row("grpc-1m-1", "gRPC 1 MiB, one in flight", GrpcLoad(_LARGE, 1, 1), BANDWIDTH, _LARGE_GOALS),
    Row("grpc-1m-8", _EIGHT_LARGE, GrpcLoad(_LARGE, 8, 1), BANDWIDTH, _LARGE_GOALS),
    Row("grpc-64m-1", "gRPC 64 MiB, one in flight", _GRPC_LARGEST, BANDWIDTH, _at_least(1.15), least_s=4.0),
    _shared_memory_row("shm-1m-read-only", "1 MiB", 1 << 20, ECHO_READ_ONLY, 0.6),
    _shared_memory_row("shm-1m", "1 MiB", 1 << 20, ECHO, 0.6),
    _shared_memory_row("shm-16m-read-only", "16 MiB", 1 << 24, ECHO_READ_ONLY, 0.25),
    _shared_memory_row("shm-16m", "16 MiB", 1 << 24, ECHO, 0.25),
    _grpc_row("bytes-64x32", "gRPC BYTES, 64 strings of 32 B", payloads.strings(64, 32), 1.5),
    _grpc_row("unbatched", "gRPC 64 B, a model without batching", payloads.unbatched(64), 2.0),
    _stream_row("tokens-1", f"{_DECOUPLED}, 1 stream", GrpcStreamLoad(_STREAM, 1, 1), _TOKENS_GOALS),
    _stream_row("tokens-64", f"{_DECOUPLED}, 64 streams", GrpcStreamLoad(_STREAM, 1, 64), _TOKENS_GOALS),
    _stream_row("first-1", f"{_FIRST}, 1 stream, median", FirstResponseLoad(_STREAM, 1), _FIRST_GOALS),
    _stream_row("first-64", f"{_FIRST}, 64 streams, median", FirstResponseLoad(_STREAM, 64), _FIRST_GOALS),
)
