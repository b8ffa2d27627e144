"""The effective values of a configuration, each with its origin, which may be the default."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.config import precedence
from gpuserve.config.entries import Entry
from gpuserve.config.load import Configuration
from gpuserve.config.precedence import Sources
from gpuserve.config.problems import Origin, dotted
from gpuserve.config.settings.values import MASK, mask_userinfo
from gpuserve.config.yaml_document import Path

_FIRST: Final = ("name", "callable")
#: Names of arguments whose values are masked: they may be the user's secrets.
_LOOKS_SECRET: Final = re.compile(r"token|secret|passw|credential|api_?key|private_?key", re.IGNORECASE)


@dataclass(frozen=True)
class EffectiveValue:
    """The value of a key, masked if secret; ``origin`` is None for a default, ``where`` its source."""

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
    """Yield every value in the order of the schema; name and callable of a model come first."""
    return _entry(configuration.entries, (), configuration.sources)


def _entry(entry: Entry, path: Path, sources: Sources) -> Iterator[EffectiveValue]:
    for name in sorted(entry.keys, key=lambda one: one not in _FIRST):
        key = entry.keys[name]
        value, place = getattr(entry, name), (*path, name)
        inner = {place: value}
        if isinstance(value, list | dict):
            pairs = enumerate(value) if isinstance(value, list) else value.items()
            inner = {(*place, step): one for step, one in pairs}
        if entries := {where: one for where, one in inner.items() if isinstance(one, Entry)}:
            for where, one in entries.items():
                yield from _entry(one, where, sources)
            continue
        shown = MASK if key.secret and value else _masked(value)
        if name not in entry.given and precedence.override_of(place, sources.overrides) is None:
            yield EffectiveValue(place, shown)
            continue
        problem = sources.problem(place, "")  # a mistake in the value would be reported at its origin
        line = None if problem.span is None else problem.span.line
        yield EffectiveValue(place, shown, problem.origin, problem.label, line)


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: MASK if _LOOKS_SECRET.search(str(key)) else _masked(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_masked(one) for one in value]
    return mask_userinfo(value) if isinstance(value, str) else value
