"""Trace settings: parsing, merging, validation and display, the scopes that override each other, and
sampling. Pure. Error texts are Triton's.

Scopes override each other from left to right::

    start ──► server (global overrides) ──► model (its overrides)

A reset setting falls back to the scope on its left. As in Triton, the remaining ``trace_count`` is the
setting's value from then on, and a scope with a count of its own keeps it over other updates.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gpuserve.config.settings.server import TraceSettings
from gpuserve.config.settings.values import mask_userinfo
from gpuserve.core.errors import InvalidArgument, Unimplemented
from gpuserve.front.requests.limits import shown

OPENTELEMETRY: Final = "opentelemetry"
_MAX_UINT32: Final = (1 << 32) - 1
_MAX_INT32: Final = (1 << 31) - 1
_MIN_COUNT: Final = -1
_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]+", re.ASCII)
#: Longer numbers are out of every range, and Python parses no more than some thousands of digits.
_MAX_DIGITS: Final = 32
#: A list of levels without a known level, which leaves the setting unchanged.
_NO_LEVEL: Final = -2


class TraceLevel(enum.Flag):
    """The contents of a trace."""

    OFF = 0
    TIMESTAMPS = enum.auto()
    TENSORS = enum.auto()


#: Settings as sent: a list of texts for each name. None resets a setting.
Changes: TypeAlias = Mapping[str, Sequence[str] | None]
#: Parsed settings: fields of ``TraceValues``.
Overrides: TypeAlias = dict[str, int]


@dataclass(frozen=True, slots=True)
class TraceValues:
    """The effective settings of a request: trace one in ``rate``, ``count`` more of them (-1: unlimited). The
    ``level`` is the number of a ``TraceLevel``, so that all values are integers.
    """

    level: int
    rate: int
    count: int
    log_frequency: int

    def problem(self, start: TraceSettings) -> str | None:
        """Return why nothing can be traced with these values, or None if tracing is possible or off."""
        if not self.level:
            return None
        if not self.rate:
            return "sample rate must be non-zero"
        if start.mode != OPENTELEMETRY and not start.file:
            return "trace file name is not given"
        return None


#: Protocol name -> field.
NAMES: Final = {
    "trace_level": "level",
    "trace_rate": "rate",
    "trace_count": "count",
    "log_frequency": "log_frequency",
}


def read_changes(changes: Changes) -> dict[str, int | None]:
    """Parse an update; None resets a field. Raise Unimplemented for the file, else InvalidArgument."""
    if "trace_file" in changes:
        raise Unimplemented("trace file location can not be updated through network protocol")
    read: dict[str, int | None] = {}
    for name, field in NAMES.items():
        if name in changes:
            texts = changes[name]
            read[field] = None if texts is None else _read_setting(name, texts)
    return {field: value for field, value in read.items() if value != _NO_LEVEL}


def described(values: TraceValues, start: TraceSettings) -> dict[str, list[str]]:
    """Return the settings for an answer, in Triton's order: a list of texts for each name."""
    answer = {
        "trace_level": [one.name or "" for one in TraceLevel(values.level)] or ["OFF"],
        "trace_rate": [str(values.rate)],
        "trace_count": [str(values.count)],
    }
    if start.mode == OPENTELEMETRY:
        resource = ",".join(f"{key}={value}" for key, value in start.resource.items())
        url = mask_userinfo(start.url)
        return answer | {"trace_mode": [start.mode], "url": [url], "resource": [resource]}
    files = {"log_frequency": [str(values.log_frequency)], "trace_file": [start.file]}
    return answer | files | {"trace_mode": [start.mode]}


def _read_setting(name: str, texts: Sequence[str]) -> int:
    if name == "trace_level":
        if "OFF" not in texts:
            return _level(texts) or _NO_LEVEL
        if len(texts) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return 0
    if len(texts) != 1:
        raise InvalidArgument(f"expect only 1 value for '{name}'")
    return _number(name, texts[0])


def _level(names: Sequence[str]) -> int:
    known = TraceLevel.__members__
    return sum(known[name].value for name in set(names) if name in known)


def _number(name: str, text: str) -> int:
    least, most = (_MIN_COUNT, _MAX_INT32) if name == "trace_count" else (0, _MAX_UINT32)
    if _INTEGER.fullmatch(text) is None:
        raise InvalidArgument(f"Unable to parse '{name}', got: {shown(text)}")
    number = int(text) if len(text) <= _MAX_DIGITS else most + 1
    if name == "trace_count" and number < least:
        raise InvalidArgument(f"Unable to parse 'trace_count'. Expecting value >= {least}, got:{shown(text)}")
    if not least <= number <= most:
        text = f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {shown(text)}"
        raise InvalidArgument(text)
    return number


# ---- sampling and scopes -------------------------------------------------------------------------


class Sampler:
    """A sampler of one scope's requests: one in ``rate``, at most ``count``."""

    __slots__ = ("left", "overrides", "values")

    def __init__(self, values: TraceValues, overrides: Overrides | None = None) -> None:
        self.values = values
        self.overrides = overrides or {}
        #: Requests until the next traced one.
        self.left = values.rate

    @property
    def level(self) -> TraceLevel:
        return TraceLevel(self.values.level)

    def sample(self, forced: bool = False) -> bool:
        """Return whether the next request is traced. ``forced``: its caller traces it, whatever the rate."""
        if not forced:
            self.left -= 1
            if self.left > 0:
                return False
        values = self.values
        if not values.level or not values.count or not values.rate:
            return False
        if not forced:
            self.left = values.rate
        if values.count > 0:
            self.values = dataclasses.replace(values, count=values.count - 1)
        return True

    def current_overrides(self) -> Overrides:
        """Return the overrides with the remaining count."""
        if "count" not in self.overrides:
            return self.overrides
        return self.overrides | {"count": self.values.count}


class TraceScopes:
    """The trace settings of the server, and of each model with settings of its own."""

    def __init__(self, start: TraceSettings) -> None:
        self.start = start
        self._initial = TraceValues(_level(start.level), start.rate, start.count, start.log_frequency)
        self._server = Sampler(self._initial)
        self._models: dict[str, Sampler] = {}

    def sampler(self, model: str = "") -> Sampler:
        """Return the sampler of a model's requests, which is the server's unless it has settings."""
        return self._models.get(model, self._server)

    def values(self, model: str = "") -> TraceValues:
        return self.sampler(model).values

    def is_own(self, model: str) -> bool:
        return model in self._models

    def update(self, model: str, read: Mapping[str, int | None]) -> None:
        """Change the settings of a model ("": the server); None resets one. Raise InvalidArgument if they
        cannot work.
        """
        scope = self._models.get(model) if model else self._server
        before = {} if scope is None else scope.current_overrides()
        overrides = {field: value for field, value in {**before, **read}.items() if value is not None}
        values = self._merged(model, overrides)
        problem = values.problem(self.start)
        if problem is not None:
            raise InvalidArgument(f"Attempting to set invalid trace setting :{problem}")
        if not model:
            self._server = Sampler(values, overrides)
            for name, other in self._models.items():
                own = other.current_overrides()
                self._models[name] = Sampler(self._merged(name, own), own)
        elif overrides:
            self._models[model] = Sampler(values, overrides)
        else:
            self._models.pop(model, None)

    def forget(self, model: str) -> None:
        self._models.pop(model, None)

    def to_wire(self) -> dict[str, Any]:
        models = {name: scope.current_overrides() for name, scope in self._models.items()}
        return {"server": self._server.current_overrides(), "models": models}

    def restore(self, wire: Mapping[str, Any]) -> None:
        overrides: Overrides = dict(wire["server"])
        self._server = Sampler(self._merged("", overrides), overrides)
        self._models = {
            name: Sampler(self._merged(name, own), dict(own)) for name, own in wire["models"].items()
        }

    def _merged(self, model: str, overrides: Overrides) -> TraceValues:
        fallback = self._server.values if model else self._initial
        return dataclasses.replace(fallback, **overrides)
