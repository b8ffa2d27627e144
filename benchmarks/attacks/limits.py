"""Cases of attacks, the limits that a server keeps meanwhile, and tables of what was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from benchmarks.attacks.attacked import PLAIN, Held, Setting
from benchmarks.attacks.connections import Victim
from benchmarks.attacks.requests import MIB
from benchmarks.figures import percentile, table


class Judgement(NamedTuple):
    """What an attack itself has seen, and whether that is as it should be."""

    text: str
    is_good: bool


class Case(NamedTuple):
    """An attack.

    ``p99_ms``: a limit of its own for the well-behaved client; 0 is the limit of all. ``least_s``: the
    shortest time of the attack. ``by_operator``: an operator or a fault does this to the server, and the
    attack takes as long as it needs.
    """

    attack: Callable[[Victim], Iterable[Judgement] | None]
    setting: Setting = PLAIN
    p99_ms: float = 0.0
    least_s: float = 0.0
    by_operator: bool = False


#: The well-behaved client asks sixty times a second; of fewer answers than these no p99 is believed.
_LEAST_PER_S: Final = 25
_HEADER: Final = (
    "attack", "broken", "p50 ms", "p99 ms", "max ms", "requests", "errors", "MiB before", "peak", "after",
    "descriptors before", "peak", "after",
)  # fmt: skip
_EARLIER: Final = ("p99 ms earlier", "now", "MiB more earlier", "now", "broken earlier")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server may do to others, and may take."""

    p99_ms: float = 250.0
    more_nbytes: int = 300 * MIB
    #: What allocators keep for later is not called kept. The interpreter keeps each MiB in which one object
    #: lives, and a burst of 200,000 streams leaves such objects in up to 75 of them.
    kept_nbytes: int = 96 * MIB
    #: Arenas and the connections of the well-behaved client come with its first requests.
    kept_descriptors: int = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """What one attack did. ``before``, ``peak``, ``after``: what the server held, where that can be seen.

    ``requests_held``: what requests hold at the end by the metrics of the server. ``judgements``: those of
    the attack itself.
    """

    attack: str
    seconds: float
    limits: Limits
    latencies_s: Sequence[float]
    errors: Mapping[str, int]
    before: Held | None
    peak: Held | None
    after: Held | None
    requests_held: int = 0
    judgements: Sequence[Judgement] = ()

    def ms(self, percent: float) -> float:
        return percentile(self.latencies_s, percent) * 1e3 if self.latencies_s else math.inf

    @property
    def more_nbytes(self) -> int:
        """How much more memory the server took than before; 0 where that cannot be seen."""
        return self.peak.nbytes - self.before.nbytes if self.before and self.peak else 0

    @property
    def broken(self) -> list[str]:
        """The limits that were not held, each in a word or two."""
        wrong = {
            "p99": self.ms(99) > self.limits.p99_ms,
            "few requests": len(self.latencies_s) < _LEAST_PER_S * self.seconds,
            "errors": bool(self.errors),
            "memory": self.more_nbytes > self.limits.more_nbytes,
            "not given back": bool(self.before and self.after)
            and keeps(self.before, self.after, self.limits),
            "blocks lost": self.requests_held > 0,
            "judged": not all(one.is_good for one in self.judgements),
        }
        return [name for name, is_so in wrong.items() if is_so]

    @property
    def row(self) -> list[str]:
        latencies = [f"{self.ms(percent):.1f}" for percent in (50, 99, 100)]
        held = (self.before, self.peak, self.after)
        memory = [f"{one.nbytes / MIB:.0f}" if one else "" for one in held]
        descriptors = [str(one.descriptors) if one else "" for one in held]
        counts = [str(len(self.latencies_s)), str(sum(self.errors.values()))]
        return [self.attack, ", ".join(self.broken), *latencies, *counts, *memory, *descriptors]

    @property
    def document(self) -> dict[str, Any]:
        return {
            **{"attack": self.attack, "broken": self.broken, "p50_ms": self.ms(50), "p99_ms": self.ms(99)},
            **{"max_ms": self.ms(100), "requests": len(self.latencies_s), "errors": dict(self.errors)},
            **{"more_mib": self.more_nbytes / MIB, "judgements": [list(one) for one in self.judgements]},
        }


def keeps(before: Held, after: Held, limits: Limits) -> bool:
    """Return whether more is held afterwards than an allocator keeps."""
    return (
        after.nbytes - before.nbytes > limits.kept_nbytes
        or after.descriptors - before.descriptors > limits.kept_descriptors
    )


def markdown(findings: Sequence[Finding]) -> str:
    """Return the table of all attacks, then the errors of the well-behaved client, and what attacks judge."""
    lines = [table(_HEADER, [one.row for one in findings], left=2), ""]
    for one in findings:
        lines += [f"- {one.attack}: {n} times {text}" for text, n in one.errors.items()]
        if one.requests_held:
            lines.append(
                f"- {one.attack}: requests hold {one.requests_held} blocks and bytes when none is there"
            )
        lines += [
            f"- {one.attack}: {'good' if is_good else 'BAD'}: {text}" for text, is_good in one.judgements
        ]
    return "\n".join(lines).rstrip() + "\n"


def compared(findings: Sequence[Finding], earlier: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the attacks beside the documents of an earlier run."""
    formerly = {one["attack"]: one for one in earlier}
    rows = []
    for one in findings:
        then = formerly.get(one.attack)
        was = (
            (f"{then['p99_ms']:.1f}", f"{then['more_mib']:.0f}", ", ".join(then["broken"]))
            if then
            else ("",) * 3
        )
        now = f"{one.ms(99):.1f}", f"{one.more_nbytes / MIB:.0f}"
        rows.append([one.attack, ", ".join(one.broken), was[0], now[0], was[1], now[1], was[2]])
    return table((*_HEADER[:2], *_EARLIER), rows, left=2) + "\n"
