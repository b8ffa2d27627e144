"""What a server holds to while it is attacked, and how what was seen compares. Values in, text out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.attacks.watched import Held
from benchmarks.scenarios.figures import percentile
from benchmarks.tables import table

MIB: Final = 1 << 20
_HEADER: Final = (
    "attack", "broken", "p50 ms", "p99 ms", "max ms", "requests", "errors", "MiB before", "peak", "after",
    "descriptors before", "peak", "after",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server may do to others, and may take."""

    p99_ms: float = 250.0
    more_nbytes: int = 300 * MIB
    #: What is not called kept: what an allocator keeps for later.
    kept_nbytes: int = 64 * MIB
    #: Arenas and the connections of the well-behaved client come with its first requests.
    kept_descriptors: int = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """What one attack did. ``before``, ``peak``, ``after``: what the server held, where that can be seen."""

    attack: str
    latencies_s: Sequence[float]
    errors: Mapping[str, int]
    before: Held | None
    peak: Held | None
    after: Held | None

    def ms(self, percent: float) -> float:
        """A percentile of the well-behaved client's latencies."""
        return percentile(self.latencies_s, percent) * 1e3 if self.latencies_s else math.inf

    def broken(self, limits: Limits) -> list[str]:
        """The limits that were not held, each in a word or two."""
        wrong = []
        if self.ms(99) > limits.p99_ms:
            wrong.append("p99")
        if self.errors:
            wrong.append("errors")
        if self.before and self.peak and self.peak.nbytes - self.before.nbytes > limits.more_nbytes:
            wrong.append("memory")
        return wrong + (["not given back"] if self.keeps(limits) else [])

    def keeps(self, limits: Limits) -> bool:
        """Whether the server still holds what it did not hold before."""
        return bool(self.before and self.after) and keeps(self.before, self.after, limits)

    def row(self, limits: Limits) -> list[str]:
        """The line of the table."""
        latencies = [f"{self.ms(percent):.1f}" for percent in (50, 99, 100)]
        held = (self.before, self.peak, self.after)
        memory = [f"{one.nbytes / MIB:.0f}" if one else "" for one in held]
        descriptors = [str(one.descriptors) if one else "" for one in held]
        counts = [str(len(self.latencies_s)), str(sum(self.errors.values()))]
        broken = ", ".join(self.broken(limits))
        return [self.attack, broken, *latencies, *counts, *memory, *descriptors]


def keeps(before: Held, after: Held, limits: Limits) -> bool:
    """Whether more is held afterwards than an allocator keeps."""
    return (
        after.nbytes - before.nbytes > limits.kept_nbytes
        or after.descriptors - before.descriptors > limits.kept_descriptors
    )


def markdown(findings: Sequence[Finding], limits: Limits) -> str:
    """The table of all attacks, then what errors the well-behaved client saw."""
    lines = [table(_HEADER, [one.row(limits) for one in findings], left=2)]
    for one in findings:
        lines += [f"{one.attack}: {n} times {text}" for text, n in one.errors.items()]
    return "\n".join(lines) + "\n"
