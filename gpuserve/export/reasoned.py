"""A value of a manifest and why it is this value. What is written as YAML carries the reason as a comment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reasoned:
    """``value`` is plain data; ``why`` is one sentence or a few, without a line break."""

    value: Any
    why: str


def value_of(part: Any) -> Any:
    """The value itself, not what is inside it."""
    return part.value if isinstance(part, Reasoned) else part


def plain(tree: Any) -> Any:
    """The tree without its reasons: dicts, lists and scalars."""
    tree = value_of(tree)
    if isinstance(tree, dict):
        return {key: plain(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [plain(one) for one in tree]
    return tree
