"""From the lines of a worker's device to a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.gpu.served.timeline import Span, is_after, overlapped, spans, svg, window

_MS = 1_000_000
_MIB = 1 << 20


def _line(kind: str, start_ms: int, end_ms: int, nbytes: int = 0) -> str:
    times = {"issued_ns": start_ms * _MS, "start_ns": start_ms * _MS, "end_ns": end_ms * _MS}
    return json.dumps({"kind": kind, "stream": 0, "nbytes": nbytes, **times})


def _pipelined(calls: int) -> list[str]:
    """Requests a millisecond apart: copied to the device, computed, copied back, a millisecond each."""
    lines = []
    for at in range(calls):
        lines += [
            _line("h2d", at, at + 1, _MIB),
            _line("call", at + 1, at + 2),
            _line("d2h", at + 2, at + 3, _MIB),
        ]
    return lines


def test_spans_are_in_their_order_and_copies_on_the_device_left_out() -> None:
    found = spans([_line("call", 2, 3), _line("d2d", 0, 1, 8), _line("h2d", 1, 2, 8)])
    assert [(one.kind, one.start_ns) for one in found] == [("h2d", _MS), ("call", 2 * _MS)]


def test_the_window_is_from_the_input_of_a_call_to_the_output_of_a_later_one() -> None:
    shown = window(spans(_pipelined(7)), 3)  # the calls that begin at 3, 4 and 5, and what else runs then
    assert [one.start_ns // _MS for one in shown if one.kind == "call"] == [2, 3, 4, 5, 6]
    assert min(one.start_ns for one in shown) == 2 * _MS
    assert max(one.end_ns for one in shown) == 7 * _MS


def test_small_copies_are_not_in_it() -> None:
    shown = window(spans([*_pipelined(3), _line("h2d", 2, 3, 64)]), 1)
    assert all(one.nbytes in {0, _MIB} for one in shown)


def test_too_few_calls_are_told() -> None:
    with pytest.raises(ValueError, match="has 2 calls with their copies, too few to show 3"):
        window(spans(_pipelined(2)), 3)


def test_a_call_without_its_input_is_told() -> None:
    lines = [_line("h2d", 2, 3, 8), _line("call", 1, 2), _line("d2h", 4, 5, 8)]
    with pytest.raises(ValueError, match="begin before their input is there"):
        window(spans(lines), 1)


def test_times_are_compared_as_finely_as_cuda_tells_them() -> None:
    lines = [json.dumps({**json.loads(one), "stream": 0}) for one in _pipelined(3)]
    late = [one.replace(f'"start_ns": {2 * _MS}', f'"start_ns": {2 * _MS - 1500}') for one in lines]
    assert late != lines
    assert window(spans(late), 1)  # its call begins 1.5 us before its input is there, by the events
    assert not is_after(_MS + 2000, _MS)
    assert is_after(_MS + 2500, _MS)


@pytest.mark.parametrize("seconds", [1, 10, 60, 300])
def test_times_long_after_the_origin_are_told_less_finely(seconds: int) -> None:
    at_ms = seconds * 1000.0
    step_ns = float(np.spacing(np.float32(at_ms))) * 1e6
    at_ns = int(at_ms * 1e6)
    assert not is_after(at_ns + int(step_ns), at_ns)
    assert is_after(at_ns + int(3 * step_ns) + 2000, at_ns)


def test_what_overlaps_is_counted_once() -> None:
    copies = [Span("h2d", 0, 6, 0), Span("d2h", 4, 8, 0), Span("d2h", 20, 30, 0)]
    assert overlapped([*copies, Span("call", 5, 10, 0)]) == 3 / 5
    assert overlapped([Span("call", 5, 10, 0)]) == 0


def test_the_picture_is_xml_with_a_bar_for_each_span() -> None:
    shown = window(spans(_pipelined(5)), 2)
    picture = ElementTree.fromstring(svg(shown, "a < b"))
    titles = picture.iter("{http://www.w3.org/2000/svg}title")
    assert sorted(one.text or "" for one in titles) == sorted(
        ["1.000 ms" if one.kind == "call" else "1.000 ms, 1 MiB" for one in shown]
    )
