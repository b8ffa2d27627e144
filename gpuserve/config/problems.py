"""Mistakes in a configuration as texts for users: place, expected value, given value."""

from __future__ import annotations

import difflib
import enum
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuserve.config.entries import MISSING, UNKNOWN, WRONG, Mistake
from gpuserve.config.settings.values import mask_userinfo
from gpuserve.config.yaml_document import Path, Span
from gpuserve.core.errors import ConfigError
from gpuserve.core.suggestions import SYNONYMS, nearest

_MAX_EXCERPT = 100
_MAX_GIVEN = 80
#: A config written by a program may be one line of megabytes.
_MAX_LINE = 4096
#: The key of an access token, even if it is misspelt, and its value.
_TOKEN = re.compile(
    r"""((?:ac+es+[_-]?)?to?ke?n["']?\s*:\s*)("(?:[^"\\]|\\.)*"?|'[^']*'?|[^\s,}]+)""", re.IGNORECASE
)


class Origin(enum.Enum):
    """The kind of source of a value; ATTRIBUTE: of a callable."""

    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True)
class Problem:
    """One mistake, ready to print. ``label`` names the source; ``model`` is one of a repository."""

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
        """Return the source line, shortened if it is long, and a line with carets under the mistake."""
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
    """All mistakes of a configuration. The text is every problem, ready to print."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)

    @property
    def only_flags(self) -> bool:
        return all(problem.origin is Origin.FLAG for problem in self.problems)


def dotted(path: Path) -> str:
    """Return a path as users write it: ``models[0].batching``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def without_token(line: str) -> str:
    """Return a source line with access tokens and passwords masked, or "" if it is too long to read."""
    if len(line) > _MAX_LINE:
        return ""
    return mask_userinfo(_TOKEN.sub(lambda found: found[1] + "*" * len(found[2]), line))


def describe(value: Any) -> str:
    """Return a given value, shortened, with its type."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"[:_MAX_GIVEN]
        case str():
            quoted = repr(mask_userinfo(value))
            return f"the string {quoted if len(quoted) <= _MAX_GIVEN else quoted[:_MAX_GIVEN] + '…'}"
        case list() | tuple():
            return f"a list of {len(value)}" if value else "an empty list"
        case Mapping():
            return "a mapping"
    return f"a value of type {type(value).__name__}"


def sentence(mistake: Mistake) -> str:
    path = mistake.path
    if mistake.kind == UNKNOWN:
        known, word = mistake.known, str(path[-1])
        places = {one.rpartition(".")[2]: one for one in reversed(mistake.nested)}
        inside = [] if word in SYNONYMS else difflib.get_close_matches(word, places, n=1, cutoff=0.85)
        hint = nearest(word, inside, places) if inside else nearest(word, known)
        hint = hint or f"; known keys are {', '.join(known)}"
        return f"unknown key {path[-1]!r} {_inside(path)}{hint}"
    if mistake.kind == MISSING:
        return f"missing key {path[-1]!r} {_inside(path)}"
    if mistake.kind == WRONG:
        return f"{dotted(path)}: {mistake.text}"
    return f"{dotted(path) or 'the config'}: expected {mistake.text}, given {describe(mistake.given)}"


def _inside(path: Path) -> str:
    return f"in {dotted(path[:-1])}" if path[:-1] else "at the top level"


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )
