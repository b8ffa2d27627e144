"""Pictures of what was simulated, as SVG. matplotlib is loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.simulations.autoscaling.grid import Case, Point
from benchmarks.simulations.autoscaling.run import Outcome

_PANEL_INCHES: Final = (4.6, 3.6)
#: Of a run: so many seconds are drawn, and a point for so many.
_SHOWN_S: Final = 4 * 3600
_EVERY_S: Final = 60
_FIGURES: Final[dict[str, Callable[[Point], float]]] = {
    "pods, times the work": lambda one: one.spare,
    "refused, % of the requests": lambda one: one.refused_part * 100,
    "p99 of the time in the queue, ms": lambda one: one.p99_ms,
}


def targets(found: Sequence[Point], window_s: int, start_s: float, path: Path) -> None:
    """What each target leads to, a curve a case."""
    figure = _figure(path, len(_FIGURES), "gpuserve_saturation: what the target costs, and what it saves")
    shown = [one for one in found if (one.window_s, one.start_s) == (window_s, start_s)]
    for axes, (label, value) in zip(figure.subplots(1, len(_FIGURES)), _FIGURES.items(), strict=True):
        for case in dict.fromkeys(one.case for one in shown):
            of_case = [one for one in shown if one.case == case]
            axes.plot([one.target for one in of_case], [value(one) for one in of_case], "o-", label=case)
        axes.set_xlabel("target")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.3)
    figure.axes[-1].set_yscale("symlog", linthresh=1)
    _finish(figure, path)


def histories(runs: Sequence[tuple[Case, Outcome]], path: Path) -> None:
    """Pods over time, and the pods that would be fully busy with what came."""
    figure = _figure(path, len(runs), "pods over time, with the settings taken")
    for axes, (case, seen) in zip(figure.subplots(1, len(runs)), runs, strict=True):
        busy = [
            sum(case.arrivals[at : at + _EVERY_S]) / _EVERY_S / case.service.capacity_hz
            for at in range(0, _until(case), _EVERY_S)
        ]
        axes.step([at / 60 for at in range(len(busy))], busy, where="post", label="fully busy with it")
        shown = [(at / 3600, pods) for at, pods, _ in seen.history if at < _until(case)]
        axes.step([at for at, _ in shown], [pods for _, pods in shown], where="post", label="there are")
        axes.set_title(case.name, fontsize=9)
        axes.set_xlabel("hours")
        axes.set_ylabel("pods")
        axes.grid(visible=True, alpha=0.3)
    _finish(figure, path)


def _until(case: Case) -> int:
    """The end of the picture, in seconds; a day is drawn whole."""
    return len(case.arrivals) if case.trace.name.startswith("diurnal") else min(_SHOWN_S, len(case.arrivals))


def _figure(path: Path, panels: int, title: str) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = path.stem
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * panels, height + 0.7), layout="constrained")
    figure.suptitle(title)
    return figure


def _finish(figure: Any, path: Path) -> None:
    """Without a date the same figures make the same file."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
