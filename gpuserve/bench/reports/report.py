"""A report: what was measured, of what, with what. Kept as JSON and read again. No file is opened here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.bench.plan.errors import BenchOptionError
from gpuserve.bench.plan.plan import LoadKind, LoadLevel
from gpuserve.bench.reports.latencies import LatencySummary
from gpuserve.bench.reports.results import LevelResult
from gpuserve.bench.server.server_time import ServerTime

_FORMAT: Final = "gpuserve bench 1"


@dataclass(frozen=True)
class BenchReport:
    """The results of a run. ``settings`` are the options that were given, by name."""

    model: str
    url: str
    began_at: str
    gpuserve: str
    cores: int
    settings: dict[str, Any]
    levels: tuple[LevelResult, ...]
    interrupted: bool = False

    @property
    def failed(self) -> int:
        return sum(one.failed for one in self.levels)

    @property
    def has_streams(self) -> bool:
        """Whether any request had more than one response."""
        return any(one.gaps.count for one in self.levels)


def to_json(report: BenchReport) -> str:
    return json.dumps({"format": _FORMAT} | dataclasses.asdict(report), indent=1, default=_kind) + "\n"


def from_json(text: str, option: str) -> BenchReport:
    """A report that ``to_json`` wrote; BenchOptionError: the text is none."""
    try:
        document = json.loads(text)
        if document.pop("format") != _FORMAT:
            raise ValueError
        document["levels"] = tuple(map(_level_result, document["levels"]))
        return BenchReport(**document)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BenchOptionError(option, "expected a .json report of gpuserve bench") from None


def _kind(kind: LoadKind) -> str:
    return kind.value


def _level_result(fields: dict[str, Any]) -> LevelResult:
    level = fields.pop("level")
    server = fields.pop("server")
    summaries: dict[str, Any] = {
        name: LatencySummary(**fields.pop(name)) for name in ("latency", "first", "gaps")
    }
    failures = {kind: (count, text) for kind, (count, text) in fields.pop("failures").items()}
    return LevelResult(
        level=LoadLevel(LoadKind(level["kind"]), level["value"]),
        server=None if server is None else ServerTime(**server),
        failures=failures,
        warnings=tuple(fields.pop("warnings")),
        **summaries,
        **fields,
    )
