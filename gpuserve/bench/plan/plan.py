"""What is measured and how long: the options of a run, checked. Pure."""

from __future__ import annotations

import enum
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from gpuserve.bench.plan.errors import BenchOptionError


class Arrivals(enum.Enum):
    """How the requests of a rate are spread over time."""

    POISSON = "poisson"  #: independent of each other, as those of many users are
    CONSTANT = "constant"  #: at equal distances


def due_times(arrivals: Arrivals, rate_per_s: float, seed: int, phase: float = 0.0) -> Iterator[float]:
    """The times when requests are due, without end; ``phase`` (0 up to 1) is how far into its first interval
    a constant rate begins: processes that share a rate do not send at the same moment.
    """
    if arrivals is Arrivals.CONSTANT:
        return ((number + phase) / rate_per_s for number in itertools.count())
    source = random.Random(seed)  # nosec B311
    return itertools.accumulate(source.expovariate(rate_per_s) for _ in itertools.count())


_MAX_LEVELS = 1000
_FORM = "expected a number, a list such as 1,2,8, or a range such as 1:64:x2 or 100:1000:100"


class LoadKind(enum.Enum):
    """What is held constant while a level is measured."""

    CONCURRENCY = "concurrency"  #: requests in flight: each answer is followed by the next request
    RATE = "rate"  #: requests a second, whether they are answered or not


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """A number of requests in flight, or of requests per second."""

    kind: LoadKind
    value: float

    def __str__(self) -> str:
        return f"{self.value:g}/s" if self.kind is LoadKind.RATE else f"{self.value:g}"

    def share(self, part: int, parts: int) -> LoadLevel:
        """The level for one of several processes that share this one."""
        if self.kind is LoadKind.RATE:
            return LoadLevel(self.kind, self.value / parts)
        whole, rest = divmod(int(self.value), parts)
        return LoadLevel(self.kind, whole + (part < rest))


def parse_levels(kind: LoadKind, text: str) -> tuple[LoadLevel, ...]:
    """The levels that an option names; BenchOptionError: a wrong form, not above 0, or too many."""
    option = f"--{kind.value}"
    try:
        values = tuple(_range(option, text) if ":" in text else map(float, text.split(",")))
    except ValueError:
        raise BenchOptionError(option, f"{_FORM}, given {text!r}") from None
    if any(not 0 < value < 1e9 for value in values):
        raise BenchOptionError(option, f"levels are above 0 and below a billion, given {text!r}")
    if kind is LoadKind.CONCURRENCY and any(value != int(value) for value in values):
        raise BenchOptionError(option, f"expected whole numbers of requests, given {text!r}")
    return tuple(LoadLevel(kind, value) for value in values)


def _range(option: str, text: str) -> Iterator[float]:
    """``first:last``, ``first:last:step`` or ``first:last:xfactor``; the last belongs to it if it is met."""
    first, last, step = (text if text.count(":") > 1 else f"{text}:1").split(":")
    value, end = float(first), float(last)
    grows = step.startswith("x")
    by = float(step[1:] if grows else step)
    if end < value or (grows and (by <= 1 or value <= 0)) or (not grows and by <= 0):
        form = "a range goes up: its last level is not below the first, and its step leads there"
        raise BenchOptionError(option, f"{form}, given {text!r}")
    for _ in range(_MAX_LEVELS):
        yield value
        value = value * by if grows else value + by
        if value > end * (1 + 1e-9):
            return
    raise BenchOptionError(option, f"a range has at most {_MAX_LEVELS} levels, given {text!r}")


_CALLS_A_CONNECTION = 32
_OPEN_LOOP_CONNECTIONS = {"grpc": 4, "http": 128}
_MAX_PROCESSES = 4


class SharedMemory(enum.Enum):
    """Where the tensors of requests and answers lie."""

    NONE = "none"  #: in requests and answers
    SYSTEM = "system"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The levels of a run and how they are measured; ``stable`` may end one before ``duration_s``.
    ``connections`` None: by the protocol and the level. ``max_in_flight`` bounds an open loop.
    """

    levels: tuple[LoadLevel, ...]
    duration_s: float = 10.0
    warmup_s: float = 1.0
    stable: bool = False
    arrivals: Arrivals = Arrivals.POISSON
    connections: int | None = None
    processes: int = 1
    max_in_flight: int = 4096
    drain_s: float = 5.0
    seed: int = 0

    def connections_of(self, level: LoadLevel, protocol: str) -> int:
        """Connections of one process for its share of a level."""
        if self.connections is not None:
            return math.ceil(self.connections / self.processes)
        if level.kind is LoadKind.RATE:
            return math.ceil(_OPEN_LOOP_CONNECTIONS[protocol] / self.processes)
        if protocol == "http":
            return int(level.value)
        return math.ceil(level.value / _CALLS_A_CONNECTION)


def check_times(duration_s: float, warmup_s: float) -> None:
    """Refuse with BenchOptionError levels without a duration, or a warm-up that ends before it began."""
    if not duration_s > 0:
        raise BenchOptionError("--duration", f"expected seconds, given {duration_s:g}")
    if not warmup_s >= 0:
        raise BenchOptionError("--warmup", f"expected seconds, given {warmup_s:g}")


def default_processes(cores: int) -> int:
    """Half of the machine, as the server is likely to be on it too."""
    return max(1, min(_MAX_PROCESSES, cores // 2))
