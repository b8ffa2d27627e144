"""The differences that are meant, and why. docs/compatibility.md has a row for each of them.

A rule names a place in an answer, and what each server has there; ``*`` stands for any text. A case is as it
is meant to be when each of its differences is covered by a rule. The words of errors may differ everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from triton_differences.compare import Difference


@dataclass(frozen=True, slots=True)
class Rule:
    """Differences of these cases, at ``where``; ``triton`` and ``gpuserve`` are values as text."""

    cases: tuple[str, ...] = ("*",)
    where: str = "*"
    triton: str = "*"
    gpuserve: str = "*"

    def covers(self, case: str, one: Difference) -> bool:
        """Whether this difference of this case is one of them."""
        return (
            any(_fits(case, pattern) for pattern in self.cases)
            and _fits(one.path, self.where)
            and _fits(str(one.triton), self.triton)
            and _fits(str(one.gpuserve), self.gpuserve)
        )


@dataclass(frozen=True, slots=True)
class Meant:
    """One way in which the servers differ on purpose, in words; without rules where no answer shows it."""

    topic: str
    triton: str
    gpuserve: str
    reason: str
    rules: tuple[Rule, ...]

    @property
    def row(self) -> str:
        """The row of the table in docs/compatibility.md."""
        return f"| {self.topic} | {self.triton} | {self.gpuserve} | {self.reason} |"


def meant_by(case: str, found: Sequence[Difference], listed: Sequence[Meant]) -> tuple[Meant, ...]:
    """The entries that together cover every difference but texts; empty where one is left over."""
    used: list[Meant] = []
    for one in found:
        if one.is_text:
            continue
        entry = next((entry for entry in listed if any(rule.covers(case, one) for rule in entry.rules)), None)
        if entry is None:
            return ()
        used.append(entry)
    return tuple(dict.fromkeys(used))


def _fits(text: str, pattern: str) -> bool:
    return fnmatchcase(text, pattern.replace("[", "[[]"))
