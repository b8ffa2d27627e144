"""From the lines that workers write of their device to a picture: spans, a window of them, SVG. No I/O.

What a line is says ``gpuserve_worker/cuda/device/runtime.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

#: By kind: the lane, and its colour.
LANES: Final = {
    "h2d": ("copies to the device", "#4878a8"),
    "call": ("the callable", "#5a9e6f"),
    "d2h": ("copies to the host", "#c07840"),
}
_WIDTH: Final = 900
_LEFT: Final = 170
_LANE: Final = 46
_TOP: Final = 44
_BAR: Final = 26
_TICKS: Final = 8
#: CUDA's events are half a microsecond fine, and a span's ends are differences of two: so far apart may two
#: times be that are the same.
_EVENTS_NS: Final = 2_000
#: CUDA tells the time between two events as milliseconds of 24 bits, and all of these are from one origin.
_BITS: Final = 24


@dataclass(frozen=True, slots=True)
class Span:
    """Something on the device, in ns from the worker's origin; the host asked for it at ``issued_ns``."""

    kind: str
    start_ns: int
    end_ns: int
    issued_ns: int
    nbytes: int = 0


def spans(lines: Iterable[str]) -> list[Span]:
    """Copies to and from the host and calls, by their start."""
    found = [
        Span(one["kind"], one["start_ns"], one["end_ns"], one["issued_ns"], one["nbytes"])
        for one in map(json.loads, lines)
        if one["kind"] in LANES
    ]
    return sorted(found, key=lambda one: one.start_ns)


def window(found: Sequence[Span], calls: int) -> list[Span]:
    """So many calls from the middle, and what runs from the first one's input to the last one's output.

    Each call has one large copy before it and one after it, and all are made in the same order. Raises
    ValueError: there are not so many calls, or copies that are not theirs.
    """
    largest = max((one.nbytes for one in found), default=0)
    lanes = {
        kind: [one for one in found if one.kind == kind and (kind == "call" or one.nbytes * 2 > largest)]
        for kind in LANES
    }
    complete = min(map(len, lanes.values()))
    first, last = (complete - calls) // 2, (complete - calls) // 2 + calls - 1
    if first < 0:
        raise ValueError(f"the timeline has {complete} calls with their copies, too few to show {calls}")
    begin, end = lanes["h2d"][first], lanes["d2h"][last]
    if is_after(begin.end_ns, lanes["call"][first].start_ns) or is_after(
        lanes["call"][last].end_ns, end.start_ns
    ):
        raise ValueError("the timeline has calls that begin before their input is there")
    return [
        one
        for lane in lanes.values()
        for one in lane
        if one.start_ns >= begin.start_ns and one.end_ns <= end.end_ns
    ]


def is_after(one_ns: int, other_ns: int) -> bool:
    """Whether a time is later than another for certain, as finely as events tell it."""
    return one_ns - other_ns > _EVENTS_NS + (max(one_ns, other_ns) >> (_BITS - 1))


def svg(shown: Sequence[Span], title: str) -> str:
    """The picture. Times are from the first start; a tick above a bar is when the host asked for it."""
    start_ns = min(min(one.start_ns, one.issued_ns) for one in shown)
    length_ns = max(one.end_ns for one in shown) - start_ns
    scale = (_WIDTH - _LEFT - 20) / length_ns
    height = _TOP + _LANE * len(LANES) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    parts += _axis(length_ns, scale, height)
    for lane, (kind, (name, colour)) in enumerate(LANES.items()):
        top = _TOP + lane * _LANE
        parts.append(f'<text x="10" y="{top + _BAR - 4}">{name}</text>')
        parts += [_bar(one, start_ns, scale, top, colour) for one in shown if one.kind == kind]
    return "\n".join([*parts, "</svg>"]) + "\n"


def overlapped(shown: Sequence[Span]) -> float:
    """The part of the time of the calls during which a copy runs too."""
    calls = [one for one in shown if one.kind == "call"]
    copies = _merged([one for one in shown if one.kind != "call"])
    both_ns = sum(
        max(0, min(call.end_ns, end_ns) - max(call.start_ns, start_ns))
        for call in calls
        for start_ns, end_ns in copies
    )
    return both_ns / max(1, sum(call.end_ns - call.start_ns for call in calls))


def _merged(found: Sequence[Span]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for one in sorted(found, key=lambda one: one.start_ns):
        if merged and one.start_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], one.end_ns))
        else:
            merged.append((one.start_ns, one.end_ns))
    return merged


def _axis(length_ns: int, scale: float, height: int) -> list[str]:
    step_ns = _step(length_ns / _TICKS)
    parts = []
    for at_ns in range(0, length_ns + 1, step_ns):
        x = _LEFT + at_ns * scale
        line = f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{height - 26}" stroke="#dddddd"/>'
        parts += [line, f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{at_ns / 1e6:g} ms</text>']
    return parts


def _step(least_ns: float) -> int:
    """The next of 1, 2, 5, 10, … µs."""
    step = 1000
    while True:
        for factor in (1, 2, 5):
            if step * factor >= least_ns:
                return step * factor
        step *= 10


def _bar(one: Span, start_ns: int, scale: float, top: int, colour: str) -> str:
    x, issued = (_LEFT + (at_ns - start_ns) * scale for at_ns in (one.start_ns, one.issued_ns))
    width = max(1.0, (one.end_ns - one.start_ns) * scale)
    took = f"{(one.end_ns - one.start_ns) / 1e6:.3f} ms"
    nbytes = f", {one.nbytes / (1 << 20):.3g} MiB" if one.nbytes else ""
    return (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
        f"<title>{took}{nbytes}</title></rect>"
        f'<line x1="{issued:.1f}" y1="{top - 6}" x2="{issued:.1f}" y2="{top}" stroke="{colour}"/>'
    )
