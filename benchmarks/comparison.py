"""Samples to ratios, the best peer of a row, and which goals are reached. Values in, values out.

A ratio is taken inside each round, where both servers met the same machine; kept are its median and range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.rounds import Sample, Samples
from benchmarks.rows import Row, Target
from benchmarks.servers import Kind

OURS = "gpuserve"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over theirs, over the rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Both in the order of the rounds."""
        by_round = [a / b for a, b in zip(ours, theirs, strict=True)]
        return cls(median(by_round), min(by_round), max(by_round))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal of a row. ``ratio`` is None where the other server has no samples."""

    against: str  #: the server's name
    is_best: bool  #: it was looked for as the best peer, not named by the goal
    target: Target
    ratio: Ratio | None

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the goal; None where it was not measured."""
        return None if self.ratio is None else self.target.met_by(self.ratio.median)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured, by server. ``kinds`` are in the order of the columns."""

    kinds: Mapping[str, Kind]
    samples: Samples

    def complete(self, row: Row, server: str) -> Sequence[Sample]:
        """The samples of a pair that failed in no round; a ratio needs the same rounds on both sides."""
        pair = row.name, server
        return () if pair in self.samples.failures else self.samples.by_pair.get(pair, ())

    def ratio(self, row: Row, server: str) -> Ratio | None:
        """Ours over that of this server; None where one of both was not measured."""
        ours, theirs = ([one.value for one in self.complete(row, name)] for name in (OURS, server))
        return Ratio.of(ours, theirs) if ours and theirs else None

    def best_peer(self, row: Row) -> str | None:
        """The peer with the best median; None where no peer was measured."""
        medians = {
            name: median(one.value for one in samples)
            for name, kind in self.kinds.items()
            if kind is Kind.PEER and (samples := self.complete(row, name))
        }
        if not medians:
            return None
        return (min if row.measure.less_is_better else max)(medians, key=lambda name: medians[name])

    def verdicts(self, row: Row) -> list[Verdict]:
        """Every goal of a row that we were measured in; that of the best peer is the first."""
        if not self.complete(row, OURS):
            return []
        best, found = self.best_peer(row), []
        if row.goals.best and best:
            found.append(Verdict(best, True, row.goals.best, self.ratio(row, best)))
        named = [Verdict(name, False, target, self.ratio(row, name)) for name, target in row.goals.named]
        return found + [one for one in named if (one.against, one.target) != (best, row.goals.best)]
