"""What pictures are made of: boxes, lines and words as SVG. Colours follow the reader's choice of light or
dark; the ground is the picture's own, so that it can be read on any page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

_STYLE: Final = """
text{font:13px system-ui,"Segoe UI",Helvetica,Arial,sans-serif;fill:var(--ink)}
.ground{fill:var(--ground);stroke:var(--edge)}.box{fill:var(--box);stroke:var(--line);stroke-width:1.4}
.strong{fill:var(--strong);stroke:var(--accent);stroke-width:1.6}.memory{fill:var(--memory);stroke:var(--warm)}
.line{fill:none;stroke:var(--line);stroke-width:1.4}.thin{fill:none;stroke:var(--edge);stroke-dasharray:4 4}
.head{fill:var(--line)}.title{font-weight:600}.small{font-size:11.5px;fill:var(--pale)}
.code{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.halo{paint-order:stroke;stroke:var(--ground);stroke-width:5px;stroke-linejoin:round}
:root{--ground:#fff;--ink:#1c2733;--pale:#55626e;--line:#5b6b79;--edge:#c9d2da;--box:#f3f6f8;--strong:#e4f3ea;
--accent:#2f7d55;--memory:#fdf3df;--warm:#c58a1d}
@media(prefers-color-scheme:dark){:root{--ground:#171c21;--ink:#e6ebef;--pale:#9fadb9;--line:#93a3b1;--edge:#3a444d;
--box:#232b32;--strong:#1d3a2c;--accent:#6fc79a;--memory:#3a2f18;--warm:#d9a441}}
""".strip()


class Point(NamedTuple):
    """A place in a picture; x to the right, y downwards."""

    x: float
    y: float


class Box(NamedTuple):
    """A rectangle around its middle."""

    middle: Point
    width: float
    height: float

    def holds(self, point: Point) -> bool:
        dx, dy = abs(point.x - self.middle.x), abs(point.y - self.middle.y)
        return dx <= self.width / 2 and dy <= self.height / 2


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Give a whole file. ``title`` is what a reader who does not see it is told."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">'
    )
    ground = f'<rect class="ground" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    return "\n".join((head, f"<style>{_STYLE}</style>", ground, *parts, "</svg>\n"))


def rectangle(box: Box, kind: str = "box", radius: float = 6) -> str:
    x, y = box.middle.x - box.width / 2, box.middle.y - box.height / 2
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{box.width:g}" height="{box.height:g}" '
        f'rx="{radius:g}"/>'
    )


def words(at: Point, text: str, kind: str = "", anchor: str = "middle") -> str:
    """Give one line of text whose middle (or ``start`` or ``end``) is at a point of its height."""
    return (
        f'<text class="{kind}" x="{at.x:g}" y="{at.y + 4.5:g}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def labelled(box: Box, lines: Iterable[tuple[str, str]], kind: str = "box") -> list[str]:
    """Give a box with lines of text in its middle, each with its kind."""
    lines = tuple(lines)
    top = box.middle.y - (len(lines) - 1) * 8.5
    placed = (
        words(Point(box.middle.x, top + 17 * row), text, style) for row, (text, style) in enumerate(lines)
    )
    return [rectangle(box, kind), *placed]


def arrow(
    start: Box, end: Box, text: str = "", bend: float = 0.0, along: float = 0.5, *, both: bool = False
) -> list[str]:
    """Give a line from one box to another, with a head, and a word upon it. ``bend`` moves its middle to the
    left of its way; ``along`` is where the word stands, of 1.
    """
    control = _beside(start.middle, end.middle, bend)
    points = [_on(start.middle, control, end.middle, step / 200) for step in range(201)]
    outside = [one for one in points if not start.holds(one) and not end.holds(one)]
    path = " ".join(f"{one.x:.1f},{one.y:.1f}" for one in (*outside[::4], outside[-1]))
    parts = [f'<polyline class="line" points="{path}"/>', _head(outside[-6], outside[-1])]
    if both:
        parts.append(_head(outside[5], outside[0]))
    if text:
        at = outside[min(len(outside) - 1, round(along * len(outside)))]
        parts.append(words(at, text, "small halo"))
    return parts


def _beside(start: Point, end: Point, bend: float) -> Point:
    length = math.dist(start, end) or 1.0
    dx, dy = (end.x - start.x) / length, (end.y - start.y) / length
    return Point((start.x + end.x) / 2 + dy * bend * 2, (start.y + end.y) / 2 - dx * bend * 2)


def _on(start: Point, control: Point, end: Point, t: float) -> Point:
    a, b, c = (1 - t) ** 2, 2 * t * (1 - t), t * t
    return Point(a * start.x + b * control.x + c * end.x, a * start.y + b * control.y + c * end.y)


def _head(before: Point, tip: Point) -> str:
    length = math.dist(before, tip) or 1.0
    dx, dy = (tip.x - before.x) / length, (tip.y - before.y) / length
    left = Point(tip.x - 9 * dx + 4 * dy, tip.y - 9 * dy - 4 * dx)
    right = Point(tip.x - 9 * dx - 4 * dy, tip.y - 9 * dy + 4 * dx)
    corners = " ".join(f"{one.x:.1f},{one.y:.1f}" for one in (tip, left, right))
    return f'<polygon class="head" points="{corners}"/>'
