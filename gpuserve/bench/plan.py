"""What is measured and how long: the options of a run, checked. Pure."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from gpuserve.bench.arrivals import Arrivals
from gpuserve.bench.errors import BenchOptionError
from gpuserve.bench.levels import Level, LoadKind

_CALLS_A_CONNECTION = 32
_OPEN_LOOP_CONNECTIONS = {"grpc": 4, "http": 128}
_MAX_PROCESSES = 4


class SharedMemory(enum.Enum):
    """Where tensors lie."""

    NONE = "none"  #: in requests and answers
    SYSTEM = "system"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Plan:
    """A run. With ``stable`` a level ends before ``duration_s`` when it shows nothing new.

    ``connections`` None: by the protocol and the level. ``max_in_flight`` bounds an open loop.
    """

    levels: tuple[Level, ...]
    duration_s: float = 10.0
    warmup_s: float = 1.0
    stable: bool = False
    arrivals: Arrivals = Arrivals.POISSON
    connections: int | None = None
    processes: int = 1
    max_in_flight: int = 4096
    drain_s: float = 5.0
    seed: int = 0

    def connections_of(self, level: Level, protocol: str) -> int:
        """Connections of one process for its share of a level."""
        if self.connections is not None:
            return math.ceil(self.connections / self.processes)
        if level.kind is LoadKind.RATE:
            return math.ceil(_OPEN_LOOP_CONNECTIONS[protocol] / self.processes)
        if protocol == "http":
            return int(level.value)
        return math.ceil(level.value / _CALLS_A_CONNECTION)


def check_times(duration_s: float, warmup_s: float) -> None:
    """Do nothing if levels can last so long.

    Raises:
        BenchOptionError: a level has no duration, or a warm-up ends before it began.
    """
    for option, given_s, fits in (
        ("--duration", duration_s, duration_s > 0),
        ("--warmup", warmup_s, warmup_s >= 0),
    ):
        if not fits:
            raise BenchOptionError(option, f"expected seconds, given {given_s:g}")


def default_processes(cores: int) -> int:
    """Half of the machine, as the server is likely to be on it too."""
    return max(1, min(_MAX_PROCESSES, cores // 2))
