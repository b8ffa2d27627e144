"""The report of one run: its conditions and its parts, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sections import Part
from benchmarks.tables import rounded


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
        """The failures of all parts."""
        return {what: text for part in self.parts for what, text in part.failures.items()}

    def markdown(self) -> str:
        """The report as Markdown."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        blocks = [f"Medians of {self.rounds} rounds of {self.seconds:g} s. {machine}."]
        blocks += [part.markdown() for part in self.parts]
        blocks += [f"Skipped: {name}: {reason}." for name, reason in self.skipped.items()]
        return "\n\n".join(blocks) + "\n"

    def write_json(self, path: Path) -> None:
        """Every sample, rounded to four digits."""
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
