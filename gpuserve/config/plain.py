"""Plain data of unknown form, as rules look at it: what has the wrong type is passed over."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuserve.config.positions import Path


class Violation(NamedTuple):
    """A rule that the value at ``path`` breaks."""

    path: Path
    text: str


def mapping(value: Any) -> dict[str, Any]:
    """The value, or an empty mapping where it is none."""
    return value if isinstance(value, dict) else {}


def entries(value: Any) -> list[tuple[int, dict[str, Any]]]:
    """The mappings of a list, with their positions."""
    listed = value if isinstance(value, list) else []
    return [(index, entry) for index, entry in enumerate(listed) if isinstance(entry, dict)]


def is_int(value: Any) -> bool:
    """Whether it is an integer; YAML's true is none."""
    return isinstance(value, int) and not isinstance(value, bool)
