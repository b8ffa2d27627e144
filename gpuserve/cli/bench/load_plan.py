"""The load of a run: levels, arrivals, durations; and the errors of ``bench`` and ``tune``. Pure."""

from __future__ import annotations

import enum
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from gpuserve.core.errors import GpuserveError


class ArrivalPattern(enum.Enum):
    """The distribution of the requests of a rate over time."""

    POISSON = "poisson"  #: independent of each other, like requests of many users
    CONSTANT = "constant"  #: at equal distances


def due_times(arrivals: ArrivalPattern, rate_per_s: float, seed: int, phase: float = 0.0) -> Iterator[float]:
    """Return an endless iterator of due times in seconds. ``phase`` (0 up to 1) shifts a constant rate, so
    that processes that share a rate do not send at the same moment.
    """
    if arrivals is ArrivalPattern.CONSTANT:
        return ((number + phase) / rate_per_s for number in itertools.count())
    source = random.Random(seed)  # nosec B311
    return itertools.accumulate(source.expovariate(rate_per_s) for _ in itertools.count())


_MAX_LEVELS = 1000
_LEVELS_FORM = "expected a number, a list such as 1,2,8, or a range such as 1:64:x2 or 100:1000:100"


class LoadKind(enum.Enum):
    """The quantity that is constant during a level."""

    CONCURRENCY = "concurrency"  #: requests in flight: each answer is followed by the next request
    RATE = "rate"  #: requests a second, whether answers arrive or not


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """A number of requests in flight, or of requests a second."""

    kind: LoadKind
    value: float

    def __str__(self) -> str:
        return f"{self.value:g}/s" if self.kind is LoadKind.RATE else f"{self.value:g}"

    def share(self, part: int, parts: int) -> LoadLevel:
        """Return the share of process number ``part`` out of ``parts``."""
        if self.kind is LoadKind.RATE:
            return LoadLevel(self.kind, self.value / parts)
        whole, rest = divmod(int(self.value), parts)
        return LoadLevel(self.kind, whole + (part < rest))


def parse_levels(kind: LoadKind, text: str) -> tuple[LoadLevel, ...]:
    """Return the levels of an option. Raise BenchOptionError for a wrong form, or values out of range."""
    option = f"--{kind.value}"
    try:
        values = tuple(_parse_range(option, text) if ":" in text else map(float, text.split(",")))
    except ValueError:
        raise BenchOptionError(option, f"{_LEVELS_FORM}, given {text!r}") from None
    if any(not 0 < value < 1e9 for value in values):
        raise BenchOptionError(option, f"expected levels above 0 and below a billion, given {text!r}")
    if kind is LoadKind.CONCURRENCY and any(value != int(value) for value in values):
        raise BenchOptionError(option, f"expected whole numbers of requests, given {text!r}")
    return tuple(LoadLevel(kind, value) for value in values)


def _parse_range(option: str, text: str) -> Iterator[float]:
    """Yield the levels of ``first:last``, with ``:step`` or ``:xfactor``; ``last`` is included if met."""
    first, last, step = (text if text.count(":") > 1 else f"{text}:1").split(":")
    value, end = float(first), float(last)
    is_factor = step.startswith("x")
    step_size = float(step[1:] if is_factor else step)
    if end < value or (is_factor and (step_size <= 1 or value <= 0)) or (not is_factor and step_size <= 0):
        form = "expected a range that ascends from its first level to its last"
        raise BenchOptionError(option, f"{form}, given {text!r}")
    for _ in range(_MAX_LEVELS):
        yield value
        value = value * step_size if is_factor else value + step_size
        if value > end * (1 + 1e-9):
            return
    raise BenchOptionError(option, f"expected at most {_MAX_LEVELS} levels in a range, given {text!r}")


_GRPC_CALLS_A_CONNECTION = 32
_OPEN_LOOP_CONNECTIONS = {"grpc": 4, "http": 128}
_MAX_PROCESSES = 4


class SharedMemory(enum.Enum):
    """The kind of shared memory that holds the tensors of requests and answers."""

    NONE = "none"  #: in requests and answers
    SYSTEM = "system"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The levels of a run and their measurement. ``stable`` may end a level before ``duration_s``. If
    ``connections`` is None, the protocol and the level decide. ``max_in_flight`` limits an open loop. Raises
    BenchOptionError unless the duration is above 0 and the warm-up not negative.
    """

    levels: tuple[LoadLevel, ...]
    duration_s: float = 10.0
    warmup_s: float = 1.0
    stable: bool = False
    arrivals: ArrivalPattern = ArrivalPattern.POISSON
    connections: int | None = None
    processes: int = 1
    max_in_flight: int = 4096
    drain_s: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.duration_s > 0:
            raise BenchOptionError("--duration", f"expected more than 0 seconds, given {self.duration_s:g}")
        if not self.warmup_s >= 0:
            raise BenchOptionError("--warmup", f"expected at least 0 seconds, given {self.warmup_s:g}")

    def connections_of(self, level: LoadLevel, protocol: str) -> int:
        """Return the number of connections of one process for its share of a level."""
        if self.connections is not None:
            return math.ceil(self.connections / self.processes)
        if level.kind is LoadKind.RATE:
            return math.ceil(_OPEN_LOOP_CONNECTIONS[protocol] / self.processes)
        if protocol == "http":
            return int(level.value)
        return math.ceil(level.value / _GRPC_CALLS_A_CONNECTION)


def default_processes(cores: int) -> int:
    """Return half of the cores, at most 4, because the server is likely to run on the same machine."""
    return max(1, min(_MAX_PROCESSES, cores // 2))


class BenchError(GpuserveError):
    """The server cannot be measured: it is absent, does not know the model, or a client process ended."""


class BenchOptionError(BenchError):
    """An option is wrong, or contradicts another option or the model."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(text)
        self.option = option

    def __str__(self) -> str:
        return f"{self.option}: {self.args[0]}"


def error_reason(error: Exception) -> str:
    """Return the system's reason for an error, in lower case and without the address."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


class MissingPackage(BenchError):
    """A package of the extra ``bench`` is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"this needs the package {package}, which is not installed: pip install 'gpuserve[bench]'"
        )
