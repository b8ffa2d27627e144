"""The limit that the search stays under, and times on the command line. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gpuserve.bench.errors import BenchOptionError
from gpuserve.bench.latencies import Summary

_FIELDS: Final = {
    "mean": "mean_ms",
    "p50": "p50_ms",
    "p90": "p90_ms",
    "p95": "p95_ms",
    "p99": "p99_ms",
    "p99.9": "p999_ms",
    "max": "max_ms",
}
_MS: Final = {"us": 0.001, "ms": 1.0, "s": 1000.0}
_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LIMIT = re.compile(r"([\w.]+)=(\d+(?:\.\d+)?)(us|ms|s)")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """A figure of the latencies, such as p99, and what it may be at most."""

    figure: str = "p99"
    most_ms: float = float("inf")

    def of(self, latency: Summary) -> float:
        """The figure, in milliseconds."""
        found: float = getattr(latency, _FIELDS[self.figure])
        return found

    def holds(self, latency: Summary) -> bool:
        """Whether these latencies stay under it."""
        return self.of(latency) <= self.most_ms


def parse_limit(text: str) -> LatencyLimit:
    """``p99=50ms``.

    Raises:
        BenchOptionError: it has another form.
    """
    found = _LIMIT.fullmatch(text)
    if found is None or found[1] not in _FIELDS:
        raise BenchOptionError(
            "--latency-limit",
            f"expected one of {', '.join(_FIELDS)} with a time, such as p99=50ms, given {text!r}",
        )
    return LatencyLimit(found[1], float(found[2]) * _MS[found[3]])


def parse_seconds(option: str, text: str) -> float:
    """``90``, ``90s``, ``10m`` or ``1h``.

    Raises:
        BenchOptionError: it has another form.
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise BenchOptionError(option, f"expected a time such as 90s or 10m, given {text!r}")
    return float(found[1]) * _SECONDS[found[2]]
