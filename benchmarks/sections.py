"""The sections of the report: what can be measured by itself, and what is found. Interfaces only.

A section says what it can measure; the command line chooses among these names and hands it a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.servers import Server

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, on which servers, and how long."""

    names: frozenset[str]
    servers: Sequence[Server]  #: prepared
    rounds: int
    seconds: float
    logs: Path
    say: Say


class Part(Protocol):
    """What a section has found. ``failures`` by what failed; there the result is none."""

    @property
    def key(self) -> str:
        """Of its document among the others."""

    @property
    def failures(self) -> Mapping[str, str]:
        """The failures, each with its reason."""

    def markdown(self) -> str:
        """The part as Markdown."""

    def document(self) -> object:
        """Every sample, for JSON."""

    def write_plots(self, folder: Path) -> list[Path]:
        """Draw what there is to draw; returns the files."""


class Section(Protocol):
    """Something to measure. Without --rows the sections that are ``is_default`` are measured."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that --rows takes."""

    @property
    def is_default(self) -> bool:
        """Whether the section is measured without --rows."""

    def missing(self, name: str) -> str | None:
        """Why this cannot be measured here; None when it can."""

    def measure(self, plan: Plan) -> Part | None:
        """Measure those of its names that are chosen; None where there is nothing to measure."""
