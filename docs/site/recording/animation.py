"""Rows of a terminal that come and go, as one SVG that plays by itself. Where nothing may move, it is the
last screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final
from xml.sax.saxutils import escape

from recording.screens import Run, Shown

_CELL: Final = 8.1
_LINE: Final = 18
_MARGIN: Final = 14
_TITLE: Final = 30
_COLOURS: Final = {
    "default": "#d8dee4", "black": "#5c6773", "red": "#f07178", "green": "#8fd19e", "brown": "#e6c07b",
    "yellow": "#e6c07b", "blue": "#82aaff", "magenta": "#c792ea", "cyan": "#7fd1d8", "white": "#ffffff",
    "cursor": "#8b98a5",
}  # fmt: skip
_STYLE: Final = (
    "text{{font:13.5px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "white-space:pre}}"
    ".r{{visibility:hidden;animation:{length:.2f}s step-end infinite}}.b{{font-weight:700}}"
    "@media(prefers-reduced-motion:reduce){{.r{{animation:none!important}}.z{{visibility:visible}}}}"
)


def animated(shown: Iterable[Shown], columns: int, rows: int, end_s: float, title: str) -> str:
    """Give the whole file; it begins anew when ``end_s`` are over."""
    width, height = columns * _CELL + 2 * _MARGIN, rows * _LINE + _TITLE + _MARGIN
    rules: list[str] = []
    body: list[str] = []
    for number, one in enumerate(shown):
        rules.append(_rule(number, one, end_s))
        last = " z" if one.to_s >= end_s else ""
        body.append(f'<g class="r{last}" style="animation-name:a{number}">{"".join(_texts(one))}</g>')
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
            f'aria-label="{escape(title)}">',
            f"<style>{_STYLE.format(length=end_s)}{''.join(rules)}</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="9" fill="#1b2128"/>',
            *(
                f'<circle cx="{20 + 18 * place}" cy="16" r="5.5" fill="{colour}"/>'
                for place, colour in enumerate(("#e5675f", "#e0b23f", "#57b65c"))
            ),
            *body,
            "</svg>\n",
        )
    )


def _rule(number: int, one: Shown, end_s: float) -> str:
    start, end = 100 * one.from_s / end_s, 100 * one.to_s / end_s
    hidden = f"{end:.2f}%{{visibility:hidden}}" if end < 100 else ""
    return f"@keyframes a{number}{{{start:.2f}%{{visibility:visible}}{hidden}}}"


def _texts(one: Shown) -> Iterator[str]:
    y = _TITLE + _LINE * one.number + 13
    for run in one.row:
        x = _MARGIN + run.column * _CELL
        bold = ' class="b"' if run.bold else ""
        length = f' textLength="{len(run.text) * _CELL:g}"' if len(run.text) > 1 else ""
        yield f'<text x="{x:g}" y="{y}" fill="{_colour(run)}"{length}{bold}>{escape(run.text)}</text>'


def _colour(run: Run) -> str:
    return _COLOURS.get(run.colour, f"#{run.colour}" if len(run.colour) == 6 else _COLOURS["default"])
