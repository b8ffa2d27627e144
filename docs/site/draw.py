"""Writes the pictures of ``docs/pictures`` that follow from the code: python docs/site/draw.py [FOLDER]"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from drawing.comparison import drawn_comparison
from drawing.processes import drawn_processes
from drawing.request import drawn_request
from drawing.states import TABLES, drawn_states

PICTURES = Path(__file__).resolve().parents[1] / "pictures"


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    yield "comparison.svg", drawn_comparison()
    yield "processes.svg", drawn_processes()
    yield "life-of-a-request.svg", drawn_request()
    for name, drawn in TABLES.items():
        yield f"{name}.svg", drawn_states(drawn)


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else PICTURES
    for name, text in pictures():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
