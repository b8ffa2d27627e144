"""What was found, as Markdown and as JSON. Values in, text out; ``write`` puts both into a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import cells, detail, rounded, table, yes_or_no
from benchmarks.gpu.running.section import Effort, Found, Outcome, Section

MARKDOWN_FILE: Final = "gpu_report.md"
JSON_FILE: Final = "gpu_report.json"
#: What two runs must have in common to be one report.
_SAME: Final = ("GPU", "driver", "gpuserve", "Python", "cupy", "torch")
#: What the JSON says of a section besides its findings.
_OF_THE_RUN: Final = ("outcome", "reason", "took_s", "title", "required")
_STAND_IN: Final = (
    "**This is a run on the stand-in for CUDA, not on a GPU: it shows that the check works. Its figures mean "
    "nothing, and no goal is judged.**"
)
#: Before every sentence that a run on the stand-in writes.
_MARK: Final = "Stand-in: "
_HOW: Final = (
    "A ratio is taken inside each round, both sides in turns; tables show the median and the range of the "
    "rounds. Every sample is in the JSON."
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
        return any(one.failed for one in self.found)

    def write(self, folder: Path) -> tuple[Path, Path]:
        markdown_file, json_file = folder / MARKDOWN_FILE, folder / JSON_FILE
        document = json.dumps(rounded(self.document()), indent=1, ensure_ascii=False)
        for file, text in ((json_file, f"{document}\n"), (markdown_file, self.markdown())):
            partial = file.with_suffix(".partial")  # a run that is killed leaves whole files
            partial.write_text(text)
            os.replace(partial, file)
        return markdown_file, json_file

    def markdown(self) -> str:
        mark = _MARK if self.stand_in else ""
        title = "the stand-in" if self.stand_in else self.machine.get("GPU", "an unknown GPU")
        blocks = [f"# GPU check on {title}"]
        if self.stand_in:
            blocks.append(_STAND_IN)
        blocks += _in_short(self.found, self.stand_in)
        blocks += [f"## {mark}The machine", table(("machine", ""), map(_cells, self.machine.items()), left=2)]
        blocks += [f"## {mark}The sections", mark + _HOW]
        blocks.append(table(("section", "outcome", "seconds"), map(_summary, self.found), left=2))
        blocks += [block for one in self.found for block in _Shown(one, self.stand_in, mark).blocks()]
        return "\n\n".join(blocks) + "\n"

    def document(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "stand_in": self.stand_in,
            "rounds": self.effort.rounds,
            "took_s": self.took_s,
            "failed": self.failed,
            "sections": {one.section.name: _section_document(one) for one in self.found},
        }


def earlier(
    folder: Path, machine: Mapping[str, str], sections: Sequence[Section], *, stand_in: bool = False
) -> list[Found]:
    """What a run of others on the same machine, whose report is in this folder, found of these sections."""
    try:
        document = json.loads((folder / JSON_FILE).read_text())
    except (OSError, ValueError):
        return []
    told = document["machine"]
    if document["stand_in"] != stand_in or any(told.get(name) != machine.get(name) for name in _SAME):
        return []
    known = document["sections"]
    return [_found(one, known[one.name]) for one in sections if one.name in known]


def _found(section: Section, document: dict[str, Any]) -> Found:
    outcome, reason, took_s, *_ = (document.pop(name) for name in _OF_THE_RUN)
    return Found(section, Outcome(outcome), reason, took_s, document)


def _section_document(one: Found) -> dict[str, Any]:
    return {
        "title": one.section.title,
        "required": one.section.required,
        "outcome": one.outcome.value,
        "reason": one.reason,
        "took_s": one.took_s,
        **{key: value for key, value in one.findings.items() if key != "ended"},
    }


# ---- the whole ----------------------------------------------------------------------------------


def _in_short(found: Sequence[Found], stand_in: bool) -> Iterator[str]:
    """What a reader wants to know first: what was to be reached, and what is wrong."""
    mark = _MARK if stand_in else ""
    yield f"## {mark}In short"
    wanted = [(one, figure) for one in found for figure in one.findings.get("figures", ()) if figure["goal"]]
    if wanted and not stand_in:
        reached = sum(bool(figure["reached"]) for _, figure in wanted)
        yield f"{reached} of {len(wanted)} goals reached."
    if wanted:
        lines = ((one.section.name, *cells(figure, is_judged=not stand_in)) for one, figure in wanted)
        yield table(("section", "case", "median (range)", "goal", "reached"), lines, left=2)
    checks = [(one, check) for one in found for check in one.findings.get("checks", ())]
    wrong = [(one, check) for one, check in checks if not check["right"]]
    if checks:
        yield f"{mark}{len(checks) - len(wrong)} of {len(checks)} checks right."
    if wrong:
        yield table(
            ("section", "not right", "seen"),
            (_cells((one.section.name, check["name"], mark + check["seen"])) for one, check in wrong),
            left=3,
        )
    for one in found:
        if one.outcome is not Outcome.DONE:
            yield f"{mark}`{one.section.name}` {one.outcome.value}: {_sentence(one.reason)}"


def _summary(one: Found) -> tuple[str, str, str]:
    optional = "" if one.section.required else " (not required)"
    return f"{one.section.name}{optional}", one.outcome.value, f"{one.took_s:.1f}"


# ---- a section ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shown:
    """A section, with ``mark`` before each of its sentences."""

    one: Found
    stand_in: bool
    mark: str

    def blocks(self) -> Iterator[str]:
        title, found = self.one.section.title, self.one.findings
        yield f"## {self.mark}{title[0].upper()}{title[1:]}"
        if self.one.outcome is not Outcome.DONE:
            yield f"{self.mark}{self.one.outcome.value.upper()}: {_sentence(self.one.reason)}"
        yield from (self.mark + _sentence(note) for note in found.get("notes", ()))
        if figures := found.get("figures"):
            yield _figures(figures, self.stand_in)
        if answers := found.get("answers"):
            header = ("question", "", "answer")
            yield table(header, (line for item in answers.items() for line in self._answers(*item)), left=3)
        if checks := found.get("checks"):
            lines = ((one["name"], yes_or_no(one["right"]), self.mark + one["seen"]) for one in checks)
            yield table(("what", "right", "seen"), map(_cells, lines), left=3)
        for case, reason in found.get("skipped", {}).items():
            yield f"{self.mark}Skipped: {case}: {_sentence(reason)}"

    def _answers(self, question: str, told: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
        """A line for each part of an answer; the first one says what was asked."""
        shown = f"**{question}**: {self.mark}{told['asked']}"
        for name, value in told["answer"].items():
            text = json.dumps(value, ensure_ascii=False)
            yield _cells((shown, name, text.strip("{}").replace('"', "")))
            shown = ""


def _figures(figures: Sequence[Mapping[str, Any]], stand_in: bool) -> str:
    names = list(dict.fromkeys(name for one in figures for name in one["details"]))
    lines = [
        (*cells(one, is_judged=not stand_in), str(one["rounds"]), *(detail(one, name) for name in names))
        for one in figures
    ]
    where = ", on the stand-in" if stand_in else ""
    return table((f"case{where}", "median (range)", "goal", "reached", "rounds", *names), lines)


def _cells(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.replace("|", "\\|").replace("\n", " ") for text in texts)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
