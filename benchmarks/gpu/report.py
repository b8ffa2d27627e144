"""What was found, as Markdown and as JSON. Values in, text out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.gpu.section import Effort, Found, Outcome, Section
from benchmarks.tables import rounded, table

MARKDOWN_FILE: Final = "gpu_report.md"
JSON_FILE: Final = "gpu_report.json"
#: What two runs must have in common to be one report.
_SAME: Final = ("GPU", "driver", "Python", "cupy", "torch")
#: What the JSON says of a section besides its findings.
_OF_THE_RUN: Final = ("outcome", "reason", "took_s", "title", "required")
_STAND_IN: Final = (
    "**This is a run on the stand-in for CUDA, not on a GPU: it shows that the check works. Its figures mean "
    "nothing.**"
)


@dataclass(frozen=True, slots=True)
class Report:
    """One run. ``machine`` by what is told of it."""

    machine: Mapping[str, str]
    effort: Effort
    stand_in: bool
    took_s: float
    found: Sequence[Found]

    @property
    def failed(self) -> bool:
        """Whether a required section failed."""
        return any(one.failed for one in self.found)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """``gpu_report.md`` and ``gpu_report.json`` in this folder."""
        markdown_file, json_file = folder / MARKDOWN_FILE, folder / JSON_FILE
        markdown_file.write_text(self.markdown())
        json_file.write_text(json.dumps(rounded(self.document()), indent=1, ensure_ascii=False) + "\n")
        return markdown_file, json_file

    def markdown(self) -> str:
        """For people."""
        title = "the stand-in" if self.stand_in else self.machine.get("GPU", "an unknown GPU")
        blocks = [f"# GPU check on {title}"]
        if self.stand_in:
            blocks.append(_STAND_IN)
        blocks.append(table(("machine", ""), self.machine.items(), left=2))
        blocks.append(
            f"The last run took {self.took_s:.0f} s. A ratio is taken inside each round; tables show the "
            "median and the range of the rounds."
        )
        blocks.append(table(("section", "outcome", "seconds"), map(_summary, self.found), left=2))
        blocks += [_section(one) for one in self.found]
        return "\n\n".join(blocks) + "\n"

    def document(self) -> dict[str, Any]:
        """Every sample, for JSON."""
        return {
            "machine": dict(self.machine),
            "stand_in": self.stand_in,
            "rounds": self.effort.rounds,
            "took_s": self.took_s,
            "failed": self.failed,
            "sections": {one.section.name: _section_document(one) for one in self.found},
        }


def earlier(folder: Path, machine: Mapping[str, str], sections: Sequence[Section]) -> list[Found]:
    """What a run of others on the same machine, whose report is in this folder, found of these sections."""
    try:
        document = json.loads((folder / JSON_FILE).read_text())
    except (OSError, ValueError):
        return []
    told = document["machine"]
    if document["stand_in"] or any(told.get(name) != machine.get(name) for name in _SAME):
        return []
    known = document["sections"]
    return [_found(one, known[one.name]) for one in sections if one.name in known]


def _found(section: Section, document: dict[str, Any]) -> Found:
    outcome, reason, took_s, *_ = (document.pop(name) for name in _OF_THE_RUN)
    return Found(section, Outcome(outcome), reason, took_s, document)


def _summary(one: Found) -> tuple[str, str, str]:
    optional = "" if one.section.required else " (not required)"
    return f"{one.section.name}{optional}", one.outcome.value, f"{one.took_s:.1f}"


def _section_document(one: Found) -> dict[str, Any]:
    return {
        "title": one.section.title,
        "required": one.section.required,
        "outcome": one.outcome.value,
        "reason": one.reason,
        "took_s": one.took_s,
        **{key: value for key, value in one.findings.items() if key != "ended"},
    }


def _section(one: Found) -> str:
    title = one.section.title
    blocks = [f"## {title[0].upper()}{title[1:]}"]
    if one.outcome is not Outcome.DONE:
        blocks.append(f"{one.outcome.value.upper()}: {_sentence(one.reason)}")
    found = one.findings
    blocks += map(_sentence, found.get("notes", ()))
    if figures := found.get("figures"):
        blocks.append(_figures(figures))
    if answers := found.get("answers"):
        blocks.append(table(("question", "answer"), map(_answer, answers.items()), left=2))
    if checks := found.get("checks"):
        lines = ((check["name"], "yes" if check["right"] else "**no**", check["seen"]) for check in checks)
        blocks.append(table(("what", "right", "seen"), (tuple(map(_cell, line)) for line in lines), left=3))
    blocks += [f"Skipped: {case}: {_sentence(reason)}" for case, reason in found.get("skipped", {}).items()]
    return "\n\n".join(blocks)


def _figures(figures: Sequence[Mapping[str, Any]]) -> str:
    details = list(dict.fromkeys(name for one in figures for name in one["details"]))
    lines = [(*_figure(one), *(_detail(one["details"].get(name)) for name in details)) for one in figures]
    return table(("case", "median (range)", "goal", "reached", "rounds", *details), lines)


def _figure(one: Mapping[str, Any]) -> tuple[str, ...]:
    samples = [sample for sample in one["samples"] if sample is not None]
    shown = _number(one["median"])
    if len(samples) > 1:
        shown += f" ({_number(min(samples))} to {_number(max(samples))})"
    reached = {None: "-", True: "yes", False: "**no**"}[one["reached"]]
    return f"{one['case']} ({one['unit']})", shown, one["goal"] or "-", reached, str(one["rounds"])


def _detail(samples: Sequence[float] | None) -> str:
    return _number(median(samples)) if samples else "-"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _answer(item: tuple[str, Any]) -> tuple[str, str]:
    question, answer = item
    return question, _cell(json.dumps(answer, ensure_ascii=False).strip("{}").replace('"', ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
