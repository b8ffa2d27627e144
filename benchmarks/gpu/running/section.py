"""The sections of a check in their order, the input of a section, and its findings."""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, Goal, document


class SectionSkipped(Exception):
    """The section, or a case of it, cannot be run here. The text says why, in one sentence."""


class SectionFailed(Exception):
    """What was looked at is not as it should be. The text says what was seen."""


class Outcome(enum.Enum):
    """What became of a section. ``UNDER_WAY`` is the last word of one whose run was killed."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    UNDER_WAY = "under way"


@dataclass(frozen=True, slots=True)
class Section:
    """One section. ``place`` is ``module:function``, called with a ``Site`` and ``Findings``.

    The run fails where a ``required`` one does. ``part`` is the run that it belongs to, where a machine is
    lent for two short ones.
    """

    name: str
    title: str
    place: str
    budget_s: float
    required: bool = True
    part: str = ""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long and how large. ``largest_nbytes`` bounds every tensor."""

    rounds: int
    seconds: float
    largest_nbytes: int

    @classmethod
    def full(cls) -> Effort:
        return cls(3, 0.4, 1 << 28)

    @classmethod
    def small(cls) -> Effort:
        """For the stand-in: whether it works, not how fast it is."""
        return cls(1, 0.05, 1 << 20)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a section runs: a folder for its files, and how much it is to do."""

    folder: Path
    effort: Effort
    stand_in: bool
    #: Seconds that the section has, after which it is ended.
    budget_s: float = math.inf

    @property
    def device(self) -> str:
        """What networks of torch run on; the stand-in has no torch."""
        return "cpu" if self.stand_in else "cuda:0"


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is right or not; ``seen`` is a sentence."""

    name: str
    right: bool
    seen: str


@dataclass(slots=True)
class Findings:
    """What a section has found so far. It is in the file after each finding, so that nothing is lost."""

    file: Path
    figures: list[Figure] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)

    def add(self, *figures: Figure) -> None:
        self.figures += figures
        self._write()

    def check(self, name: str, right: bool, seen: str) -> None:
        """Something that is right or not; the section fails where one is not."""
        self.checks.append(Check(name, right, seen))
        self._write()

    def replace_checks(self, start: str, checks: Sequence[Check], facts: Mapping[str, Any]) -> None:
        """These in the place of those whose names start so, and facts beside them."""
        self.checks = [one for one in self.checks if not one.name.startswith(start)] + list(checks)
        self.facts |= facts
        self._write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._write()

    def skip(self, case: str, reason: str) -> None:
        self.skipped[case] = reason
        self._write()

    def answer(self, question: str, asked: str, answer: Mapping[str, Any]) -> None:
        """What the machine says to a question, with what was asked in a sentence; shown as it is."""
        self.answers[question] = {"asked": asked, "answer": answer}
        self._write()

    def keep(self, **facts: Any) -> None:
        """What other programs read out of the JSON."""
        self.facts |= facts
        self._write()

    def end(self, outcome: Outcome, reason: str = "") -> None:
        self._write({"outcome": outcome.value, "reason": reason})

    @property
    def wrong(self) -> list[str]:
        return [f"{one.name}: {one.seen}" for one in self.checks if not one.right]

    def _write(self, ended: Mapping[str, str] | None = None) -> None:
        whole = {
            "ended": ended,
            "figures": [document(one) for one in self.figures],
            "checks": [asdict(one) for one in self.checks],
            "notes": self.notes,
            "skipped": self.skipped,
            "facts": self.facts,
            "answers": self.answers,
        }
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(whole, ensure_ascii=False))
        os.replace(partial, self.file)


_NOT_WHOLE: Final = frozenset({Outcome.FAILED, Outcome.UNDER_WAY})


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a section: what it found, and what became of it."""

    section: Section
    outcome: Outcome
    reason: str
    took_s: float
    findings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.section.required and self.outcome in _NOT_WHOLE


def ratio_figure(
    case: str, unit: str, ours: list[float], theirs: list[float], goal: Goal | None, **details: list[float]
) -> Figure:
    """Ours / theirs, taken inside each round."""
    ratios = tuple(one / other for one, other in zip(ours, theirs, strict=True))
    return Figure(case, unit, ratios, goal, {name: tuple(values) for name, values in details.items()})


#: Each fits into ten minutes.
FACTS: Final = "facts"
REPORT: Final = "report"
PARTS: Final = (FACTS, REPORT)
#: For a part, with what comes before its first section; starting the check and reporting come on top.
PART_BUDGET_S: Final = 550.0


def _section(
    name: str, title: str, budget_s: float, place: str = "", *, part: str = REPORT, required: bool = True
) -> Section:
    place = place or f"{name.replace('-', '_')}:run"
    return Section(name, title, f"benchmarks.gpu.sections.{place}", budget_s, required, part)


SECTIONS: Final = (
    _section("facts", "what the device, its driver and its libraries do", 75, part=FACTS),
    _section("bandwidth", "copies of the worker against copies from page-locked memory", 25),
    _section("overlap", "copies and compute at the same time", 35, "overlap:overlap"),
    _section("networks", "networks in torch, through the server and in a bare loop", 70, "networks:networks"),
    _section("instances", "1, 2 and 4 instances on one GPU", 40, "networks:instances"),
    _section("cuda-ipc", "requests whose tensors stay on the device", 35),
    _section(
        "sentences", "sentence embeddings, through the server and in a bare loop", 30, "networks:sentences"
    ),
    _section(
        "peers", "other servers and a bare loop on the same network", 60, "networks:peers", required=False
    ),
    _section("profile", "streams and copies of requests on a timeline", 25, "overlap:profile"),
    _section(
        "sharing", "processes that share the GPU, and the host's memory", 50, "facts:sharing", part=FACTS
    ),
    _section("frameworks", "libraries of networks on the device", 60, "facts:frameworks", part=FACTS),
    _section("device-tests", "the tests of tests/device on this machine", 260, part=FACTS),
    _section("faults", "what goes wrong on a device, and what is left of it", 50, part=FACTS),
)


def stretched(sections: Sequence[Section], budget_s: float) -> tuple[Section, ...]:
    """The same, each with so much more time as there is for all: on a fresh machine everything is cold."""
    factor = max(1.0, budget_s / sum(one.budget_s for one in sections))
    return tuple(replace(one, budget_s=one.budget_s * factor) for one in sections)
