"""The values of a configuration as YAML, each with a comment on where it comes from. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from gpuserve.config.effective import EffectiveValue
from gpuserve.config.problems import Origin
from gpuserve.config.yaml_document import Path, parse_value

#: Text that YAML reads as it stands, in a flow collection too.
_PLAIN: Final = re.compile(r"[A-Za-z_/.][\w./*-]*(:[\w./*-]+)*")
#: Comments begin here at the latest; a longer line has its own two blanks further on.
_WIDEST: Final = 48


def as_text(values: Iterable[EffectiveValue]) -> str:
    """Write the values as lines of YAML."""
    pairs = list(_lines(values))
    width = min(_WIDEST, max((len(text) for text, comment in pairs if comment), default=0))
    return "".join(f"{text:<{width}}  # {comment}\n" if comment else f"{text}\n" for text, comment in pairs)


def _lines(values: Iterable[EffectiveValue]) -> Iterator[tuple[str, str]]:
    """Each line and its comment; the mappings and lists on the way to a value have lines of their own."""
    before: Path = ()
    for one in values:
        parents = one.path[:-1]
        shared = _shared(before, parents)
        item = False
        for depth, step in enumerate(parents[shared:], shared):
            if isinstance(step, int):
                item = True
            else:
                yield _at(depth, f"{_text(step)}:", item), ""
                item = False
        yield _at(len(parents), f"{_text(str(one.path[-1]))}: {_text(one.value)}", item), _comment(one)
        before = parents


def _shared(one: Path, other: Path) -> int:
    """How many steps two paths begin with in common."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _at(depth: int, text: str, item: bool) -> str:
    """The text of a line at a depth, where it may begin an item of a list."""
    return f"{'  ' * (depth - 1)}- {text}" if item else f"{'  ' * depth}{text}"


def _comment(value: EffectiveValue) -> str:
    if value.origin is None:
        return "default"
    if value.origin is Origin.FILE and value.line is not None:
        return f"{value.where}:{value.line}"
    return value.where


def _text(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and parse_value(value) == value
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_text, value)) + "]"
    return json.dumps(value)
