"""The values of the trace settings: how they are read from text, merged, checked and shown. Pure. Who has
which values is in ``scopes.py``; the texts of the errors are Triton's.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gpuserve.config.settings.server import TraceSettings
from gpuserve.config.settings.values import mask_userinfo
from gpuserve.core.errors import InvalidArgument, Unimplemented
from gpuserve.front.v2.limits import shown

OPENTELEMETRY: Final = "opentelemetry"
_MAX_UINT32: Final = (1 << 32) - 1
_MAX_INT32: Final = (1 << 31) - 1
_MIN_COUNT: Final = -1
_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]+", re.ASCII)
#: Longer ones are out of every range, and Python parses no more than some thousands.
_MAX_DIGITS: Final = 32
#: A list of levels that names none we know; it leaves the setting as it is.
_NO_LEVEL: Final = -2


class TraceLevel(enum.Flag):
    """What is noted of a traced request."""

    OFF = 0
    TIMESTAMPS = enum.auto()
    TENSORS = enum.auto()


#: Settings as they were sent: a list of texts for each name. None takes a setting back.
Changes: TypeAlias = Mapping[str, Sequence[str] | None]
#: The same, read: fields of ``TraceValues``.
Overrides: TypeAlias = dict[str, int]


@dataclass(frozen=True, slots=True)
class TraceValues:
    """The settings that count for a request: one in ``rate``, ``count`` more of them (-1: without end).
    ``level`` is the number of a ``Level``, so that all of it are integers.
    """

    level: int
    rate: int
    count: int
    log_frequency: int

    def problem(self, start: TraceSettings) -> str | None:
        """Why nothing can be traced with these; None where it can, or is not meant to."""
        if not self.level:
            return None
        if not self.rate:
            return "sample rate must be non-zero"
        if start.mode != OPENTELEMETRY and not start.file:
            return "trace file name is not given"
        return None


#: The name in the protocol of each field.
NAMES: Final = {
    "trace_level": "level",
    "trace_rate": "rate",
    "trace_count": "count",
    "log_frequency": "log_frequency",
}


def start_values(start: TraceSettings) -> TraceValues:
    return TraceValues(_level(start.level), start.rate, start.count, start.log_frequency)


def read_changes(changes: Changes) -> dict[str, int | None]:
    """The fields of an update; None takes one back. Unimplemented: the file; InvalidArgument: bad value."""
    if "trace_file" in changes:
        raise Unimplemented("trace file location can not be updated through network protocol")
    read: dict[str, int | None] = {}
    for name, field in NAMES.items():
        if name in changes:
            texts = changes[name]
            read[field] = None if texts is None else _read(name, texts)
    return {field: value for field, value in read.items() if value != _NO_LEVEL}


def applied(overrides: Overrides, read: Mapping[str, int | None]) -> Overrides:
    """The overrides of a scope after an update; what is None in it is taken back."""
    together = {**overrides, **read}
    return {field: value for field, value in together.items() if value is not None}


def described(values: TraceValues, start: TraceSettings) -> dict[str, list[str]]:
    """The settings as they are answered, in Triton's order: a list of texts for each name."""
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


def _read(name: str, texts: Sequence[str]) -> int:
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
        raise InvalidArgument(
            f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {shown(text)}"
        )
    return number
