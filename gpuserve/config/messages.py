"""How a mistake in the configuration is told: where it stands, what was expected, what was given. ``Problem``
is one mistake, ready to print; the functions turn what the schema found into its sentences. Nothing is read
or printed here.
"""

from __future__ import annotations

import enum
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuserve.config.entries.kinds import MISSING, UNKNOWN, WRONG, Mistake
from gpuserve.config.positions import Path, Span
from gpuserve.errors import ConfigError
from gpuserve.options import nearest
from gpuserve.settings.urls import without_userinfo

_MAX_EXCERPT = 100
_MAX_GIVEN = 80
#: A config that a program has written may be one line of megabytes.
_MAX_LINE = 4096
#: The key, even if it is misspelt, and its value up to the end of it.
_TOKEN = re.compile(
    r"""((?:ac+es+[_-]?)?to?ke?n["']?\s*:\s*)("(?:[^"\\]|\\.)*"?|'[^']*'?|[^\s,}]+)""", re.IGNORECASE
)


class Origin(enum.Enum):
    """The kind of source that gave a value: a file, a variable, a flag, or an attribute of a callable."""

    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True)
class Problem:
    """One mistake. ``label`` is the file's name, or what else gave the value: a variable, a flag. ``model``
    is the one of a repository that it is about, so that the others do not suffer for it.
    """

    label: str
    message: str
    origin: Origin
    span: Span | None = None
    source_line: str = ""
    model: str = ""

    def __str__(self) -> str:
        if self.span is None:
            return f"{self.label}: {self.message}"
        head = f"{self.label}:{self.span.line}:{self.span.column}: {self.message}"
        return "\n".join((head, *self._excerpt(self.span))) if self.source_line.strip() else head

    def as_json(self) -> dict[str, Any]:
        place = {"line": self.span.line, "column": self.span.column} if self.span else {}
        return {"origin": self.origin.value, "where": self.label, **place, "message": self.message}

    def _excerpt(self, span: Span) -> tuple[str, str]:
        """The source line and a line with carets under what is wrong; a long line is cut."""
        cut = max(0, span.column - 1 - _MAX_EXCERPT // 2) if len(self.source_line) > _MAX_EXCERPT else 0
        shown = self.source_line[cut : cut + _MAX_EXCERPT].replace("\t", " ")
        before = shown[: span.column - 1 - cut]
        marked = shown[span.column - 1 - cut :][: span.length] or " "
        number = str(span.line)
        return (
            f"  {number} | {shown.rstrip()}",
            f"  {' ' * len(number)} | {' ' * _width(before)}{'^' * _width(marked)}",
        )


class ConfigProblems(ConfigError):
    """All that is wrong with a configuration. The text is every problem, ready to print."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)

    @property
    def only_flags(self) -> bool:
        return all(problem.origin is Origin.FLAG for problem in self.problems)


def dotted(path: Path) -> str:
    """A path as users read it: ``models[0].batching``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def without_token(line: str) -> str:
    """Mask the access token in a source line by asterisks, and the user and the password of a URL; show no
    line that is too long to be read.
    """
    if len(line) > _MAX_LINE:
        return ""
    return without_userinfo(_TOKEN.sub(lambda found: found[1] + "*" * len(found[2]), line))


def describe(value: Any) -> str:
    """What was given, shortly and with its type."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"[:_MAX_GIVEN]
        case str():
            quoted = repr(without_userinfo(value))
            return f"the string {quoted if len(quoted) <= _MAX_GIVEN else quoted[:_MAX_GIVEN] + '…'}"
        case list() | tuple():
            return f"a list of {len(value)}" if value else "an empty list"
        case Mapping():
            return "a mapping"
    return f"a value of type {type(value).__name__}"


def sentence(mistake: Mistake) -> str:
    """What the schema found as a sentence that stands after the place."""
    path = mistake.path
    if mistake.kind == UNKNOWN:
        known = mistake.known
        hint = nearest(str(path[-1]), known) or f"; known keys are {', '.join(known)}"
        return f"unknown key {path[-1]!r} {_inside(path)}{hint}"
    if mistake.kind == MISSING:
        return f"missing key {path[-1]!r} {_inside(path)}"
    if mistake.kind == WRONG:
        return f"{dotted(path)}: {mistake.text}"
    return f"{dotted(path)}: expected {mistake.text}, given {describe(mistake.given)}"


def _inside(path: Path) -> str:
    return f"in {dotted(path[:-1])}" if path[:-1] else "at the top level"


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )
