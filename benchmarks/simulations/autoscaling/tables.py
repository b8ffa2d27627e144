"""What was simulated as Markdown, and as plain data. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks.simulations.autoscaling.grid import Case, Point, Variation, point
from benchmarks.simulations.autoscaling.service import Service, Steady, load_at
from benchmarks.simulations.autoscaling.traffic import Trace

_HEADS: Final = "pods; traffic | pods, mean | times the work | refused | queue p50 | p99 | changes | most"


def meaning(services: Iterable[tuple[Service, Sequence[Steady]]], targets: Sequence[float]) -> Iterator[str]:
    """The load that each saturation stands for."""
    yield f"| pod | requests/s at most | {' | '.join(f'{target:g}' for target in targets)} |"
    yield f"| --- | ---: {'| ---: ' * len(targets)}|"
    for service, states in services:
        loads = " | ".join(f"{load_at(states, target):.0%}" for target in targets)
        yield f"| {service.name} | {service.capacity_hz:,.0f} | {loads} |"


def by_target(found: Sequence[Point], window_s: int, start_s: float) -> Iterator[str]:
    """Every case, with a line for each target."""
    yield f"| target | {_HEADS} |"
    yield f"| ---: | --- {'| ---: ' * 7}|"
    for one in found:
        if (one.window_s, one.start_s) == (window_s, start_s):
            yield f"| {one.target:g} | {one.case} | {_cells(one)} |"


def by_window(found: Sequence[Point], target: float, start_s: float) -> Iterator[str]:
    """Every case under one target, a line a window."""
    yield f"| window down | {_HEADS} |"
    yield f"| ---: | --- {'| ---: ' * 7}|"
    for one in found:
        if (one.target, one.start_s) == (target, start_s):
            yield f"| {one.window_s} s | {one.case} | {_cells(one)} |"


def varied(over: Sequence[Case], lines: Iterable[Variation]) -> Iterator[str]:
    """One thing at a time: refused and pods for the work, in each case."""
    yield f"| what | | {' | '.join(case.name for case in over)} |"
    yield f"| --- | --- {'| ---: ' * len(over)}|"
    for one in lines:
        seen = [point(case, one.setting, one.where) for case in over]
        cells = " | ".join(f"{at.refused_part:.2%}, {at.spare:.2f}" for at in seen)
        yield f"| {one.what} | {one.value} | {cells} |"


def plain(found: Iterable[Point], taken: tuple[float, int], command: str) -> dict[str, Any]:
    """The table as plain text, for a file."""
    points = [{name: _short(value) for name, value in one._asdict().items()} for one in found]
    return {"command": command, "taken": {"target": taken[0], "window_s": taken[1]}, "points": points}


def own(over: Sequence[Case], trace: Trace, counts: Sequence[int]) -> list[Case]:
    """The same pods under a trace of one's own."""
    services = {case.service: case for case in over}
    return [replace(case, trace=trace, arrivals=counts) for case in services.values()]


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _cells(one: Point) -> str:
    waits = f"{one.p50_ms:.1f} ms | {one.p99_ms:,.1f} ms"
    pods = f"{one.pods:.1f} | {one.spare:.2f}"
    return f"{pods} | {one.refused_part:.2%} | {waits} | {one.events} | {one.most_pods}"
