"""Tables as lines of text that fit a terminal: nothing is broken in the middle of a word. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_GAP: Final = "  "
#: Stands for a space that a line must not be broken at.
_KEPT_SPACE: Final = "\0"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Write rows below a head, in columns as wide as what is in them; no text is cut. Where that is wider
    than ``width``, each row becomes a paragraph.
    """
    rows = list(rows)
    if width is not None and not fits(head, rows, width):
        for row in rows:
            yield from _paragraph(head, row, width)
        return
    widths = _widths(head, rows)
    for line in (head, *rows):
        yield _GAP.join(f"{text:<{column}}" for text, column in zip(line, widths, strict=True)).rstrip()


def fits(head: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> bool:
    """Whether a table is not wider than that."""
    return sum(_widths(head, rows)) + len(_GAP) * (len(head) - 1) <= width


def _widths(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(head, *rows, strict=True)]


def _paragraph(head: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    """Write a row as its first column and, below it, each other with its name."""
    yield shortened(f"{head[0].lower()} {row[0]}", width)
    pairs = [f"{name.lower()} {text}" for name, text in zip(head[1:], row[1:], strict=True)]
    whole = [shortened(pair, width - len(_GAP) - 1).replace(" ", _KEPT_SPACE) for pair in pairs]
    for line in wrapped(", ".join(whole), width):
        yield line.replace(_KEPT_SPACE, " ")


def wrapped(text: str, width: int) -> list[str]:
    """Break a text at spaces into lines that are indented; a word that is longer than a line is cut."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=_GAP,
        subsequent_indent=_GAP,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [shortened(line, width) for line in lines]


def shortened(text: str, width: int) -> str:
    """Leave out the end of a text that is longer than a line."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def shortened_path(path: str, width: int) -> str:
    """Leave out the first folders of a path that is longer than a line."""
    return path if len(path) <= width else f"…{path[len(path) - width + 1 :]}"
