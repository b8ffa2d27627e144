"""The values that hold in the end, each with what gave it: a flag, a variable, a line of a file, a callable,
or nobody, where it is the default. Pure; nothing is printed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.config import precedence
from gpuserve.config.entries.fields import Entry, Key
from gpuserve.config.load import Configuration
from gpuserve.config.messages import Origin, dotted
from gpuserve.config.positions import Path
from gpuserve.config.sources import Sources
from gpuserve.settings.urls import MASK, without_userinfo

#: Who reads a model's entry wants these first.
_FIRST: Final = ("name", "callable")
#: Arguments of a callable are the user's own: what is called so is nobody else's to see.
_LOOKS_SECRET: Final = re.compile(r"token|secret|passw|credential|api_?key|private_?key", re.IGNORECASE)


@dataclass(frozen=True)
class EffectiveValue:
    """The value of a key, masked where it is secret. ``origin`` is None for a default; ``where`` names what
    gave the value, and ``line`` where in it.
    """

    path: Path
    value: Any
    origin: Origin | None = None
    where: str = ""
    line: int | None = None

    def as_json(self) -> dict[str, Any]:
        origin = "default" if self.origin is None else self.origin.value
        place = {"where": self.where} if self.where else {}
        line = {"line": self.line} if self.line else {}
        return {"key": dotted(self.path), "value": self.value, "origin": origin, **place, **line}


def effective(configuration: Configuration) -> Iterator[EffectiveValue]:
    """Every value of a configuration, in the order of the schema but for names, which come first."""
    return _entry(configuration.entries, (), configuration.sources)


def _entry(entry: Entry, path: Path, sources: Sources) -> Iterator[EffectiveValue]:
    for name in sorted(entry.keys, key=lambda one: one not in _FIRST):
        key = entry.keys[name]
        value, place = getattr(entry, name), (*path, name)
        inner = _inner(value, place)
        if inner:
            for one, where in inner:
                yield from _entry(one, where, sources)
        else:
            yield _value(value, place, key, is_given=name in entry.given, sources=sources)


def _inner(value: Any, path: Path) -> list[tuple[Entry, Path]]:
    """The mappings of the schema that a value is or holds, each with its path."""
    if isinstance(value, Entry):
        return [(value, path)]
    if isinstance(value, list):
        return [(one, (*path, index)) for index, one in enumerate(value) if isinstance(one, Entry)]
    if isinstance(value, dict):
        return [(one, (*path, key)) for key, one in value.items() if isinstance(one, Entry)]
    return []


def _value(value: Any, path: Path, key: Key, *, is_given: bool, sources: Sources) -> EffectiveValue:
    shown = MASK if key.secret and value else _masked(value)
    if not is_given and precedence.override_of(path, sources.overrides) is None:
        return EffectiveValue(path, shown)
    told = sources.problem(path, "")  # it knows where a mistake in this value would be
    return EffectiveValue(path, shown, told.origin, told.label, None if told.span is None else told.span.line)


def _masked(value: Any) -> Any:
    """A value of any kind without what is called a secret in it."""
    if isinstance(value, Mapping):
        return {key: MASK if _LOOKS_SECRET.search(str(key)) else _masked(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_masked(one) for one in value]
    return without_userinfo(value) if isinstance(value, str) else value
