"""Findings as JSON and as lines for people. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpuserve.cli.doctor.judgement import Judgement, Severity, has_fault

_LEVEL_WIDTH: Final = max(len(level.value) for level in Severity)


def as_json(found: Sequence[Judgement]) -> dict[str, Any]:
    return {"ok": not has_fault(found), "findings": [one.as_json() for one in found]}


def as_text(found: Sequence[Judgement], width: int) -> str:
    """Write a line for each finding, wrapped behind its topic, advice below it, and last how many are bad."""
    topics = max(len(one.topic) for one in found)
    lines = [line for one in found for line in _lines(one, topics, width)]
    return "\n".join([*lines, "", _summary(found)]) + "\n"


def _lines(finding: Judgement, topics: int, width: int) -> Iterator[str]:
    head = f"{finding.level.value:<{_LEVEL_WIDTH}}  {finding.topic:<{topics}}  "
    rest = " " * len(head)
    for number, paragraph in enumerate(finding.text.split("\n")):
        yield from _wrapped(paragraph, rest if number else head, rest, width)
    if finding.advice:
        yield from _wrapped(finding.advice, f"{rest}→ ", f"{rest}  ", width)


def _wrapped(text: str, head: str, rest: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(found: Sequence[Judgement]) -> str:
    counts = {level: sum(one.level is level for one in found) for level in (Severity.FAULT, Severity.WARNING)}
    told = [f"{count} {level.value}{'s' if count != 1 else ''}" for level, count in counts.items() if count]
    return ", ".join(told) or "nothing is wrong"
