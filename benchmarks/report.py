"""The report of one run, and the interface of its sections."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import rounded
from benchmarks.servers.server import Server

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    names: frozenset[str]
    servers: Sequence[Server]  #: prepared
    rounds: int
    seconds: float
    logs: Path
    say: Say


class Part:
    """What a section has found. ``key`` is that of its document among the others; ``failures`` are the
    reasons by what failed.
    """

    __slots__ = ()
    key: str
    failures: Mapping[str, str]

    def markdown(self) -> str:
        raise NotImplementedError

    def document(self) -> object:
        raise NotImplementedError


class Section:
    """Something to measure. ``names`` are those that --rows takes."""

    names: tuple[str, ...]

    def missing(self, name: str) -> str | None:
        """Return why this cannot be measured here; None when it can."""
        del name
        return None

    def measure(self, plan: Plan) -> Part | None:
        """Measure those of its names that are chosen; return None if there is nothing to measure."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured, and on what. ``titles`` by server name, in the order of the columns."""

    machine: dict[str, str]
    rounds: int
    seconds: float
    titles: dict[str, str]
    skipped: dict[str, str]
    parts: Sequence[Part]

    @property
    def failures(self) -> dict[str, str]:
        return {what: text for part in self.parts for what, text in part.failures.items()}

    def markdown(self) -> str:
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        blocks = [f"Medians of {self.rounds} rounds of {self.seconds:g} s. {machine}."]
        blocks += [part.markdown() for part in self.parts]
        blocks += [f"Skipped: {name}: {reason}." for name, reason in self.skipped.items()]
        return "\n\n".join(blocks) + "\n"

    def write_json(self, path: Path) -> None:
        document = {
            "machine": self.machine,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "servers": self.titles,
            "skipped": self.skipped,
            **{part.key: part.document() for part in self.parts},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rounded(document), indent=1, ensure_ascii=False) + "\n")
