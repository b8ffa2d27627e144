"""What a terminal shows at each moment of a session: rows of cells, and how long each row stays."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import pyte

from recording.session import Piece

#: Pieces that come closer together than a screen is painted are one.
_FRAME_S: Final = 0.04


class Run(NamedTuple):
    """Cells of one look, side by side."""

    column: int
    text: str
    colour: str
    bold: bool


Row = tuple[Run, ...]


class Shown(NamedTuple):
    """A row that is on the screen from one moment to another."""

    number: int
    row: Row
    from_s: float
    to_s: float


def shown_rows(pieces: Iterable[Piece], columns: int, rows: int, end_s: float) -> Iterator[Shown]:
    """Yield each content that each row has, in the order in which it comes."""
    current: dict[int, tuple[Row, float]] = {}
    for at_s, screen in _screens(pieces, columns, rows):
        for number, row in enumerate(screen):
            before, since_s = current.get(number, ((), 0.0))
            if before != row:
                if before:
                    yield Shown(number, before, since_s, at_s)
                current[number] = (row, at_s)
    for number, (row, since_s) in current.items():
        if row:
            yield Shown(number, row, since_s, end_s)


def _screens(pieces: Iterable[Piece], columns: int, rows: int) -> Iterator[tuple[float, list[Row]]]:
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    for _, group in itertools.groupby(pieces, lambda piece: int(piece.at_s / _FRAME_S)):
        together = list(group)
        stream.feed(b"".join(piece.data for piece in together))
        yield together[-1].at_s, [_row(screen, number) for number in range(rows)]


def _row(screen: pyte.Screen, number: int) -> Row:
    """Give the runs of a row; the cursor is a run of its own, a block."""
    cells = screen.buffer[number]
    found: list[Run] = []
    looks = itertools.groupby(range(screen.columns), lambda column: (cells[column].fg, cells[column].bold))
    for (colour, bold), group in looks:
        columns = list(group)
        text = "".join(cells[column].data for column in columns)
        if text.strip():
            start = columns[0] + len(text) - len(text.lstrip())
            found.append(Run(start, text.strip(), colour, bold))
    if number == screen.cursor.y and not screen.cursor.hidden:
        found.append(Run(screen.cursor.x, "\N{FULL BLOCK}", "cursor", False))
    return tuple(found)
