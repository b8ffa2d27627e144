"""Markdown tables, and floats for JSON. Values in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(header: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table of Markdown; so many columns from the left hold words, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])


def rounded(value: object) -> object:
    """The same document with every float cut to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return value
