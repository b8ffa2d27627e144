"""The plots of a report as SVG, made by matplotlib without a display and without pyplot's state."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

from gpuserve.bench.plan.errors import MissingPackage
from gpuserve.bench.plan.plan import LoadKind
from gpuserve.bench.reports.latencies import percentile_curve
from gpuserve.bench.reports.report import BenchReport

#: Of so many powers of ten each has its number.
_MOST_DECADES = 8
_SIZE_INCHES = (6.4, 3.6)
_PERCENTILE_TICKS = (50, 90, 99, 99.9, 99.99)


def plots(report: BenchReport) -> list[tuple[str, str]]:
    """The plots of a report as (title, SVG); MissingPackage: matplotlib is not installed."""
    titles: list[tuple[str, Callable[[Any, BenchReport], None]]] = [("Latency by percentile", _percentiles)]
    if len(report.levels) > 1:
        titles = [("Throughput", _throughput), ("Latency against throughput", _latency), *titles]
    return [(title, _svg(report, draw)) for title, draw in titles]


def require_matplotlib() -> Any:
    """``matplotlib.figure``, which draws without pyplot; MissingPackage: it is not installed."""
    try:
        from matplotlib import figure
    except ImportError:
        raise MissingPackage("matplotlib") from None
    return figure


def _svg(report: BenchReport, draw: Callable[[Any, BenchReport], None]) -> str:
    figure = require_matplotlib().Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, report)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)


def _throughput(axes: Any, report: BenchReport) -> None:
    axes.plot([one.level.value for one in report.levels], [one.throughput for one in report.levels], "o-")
    axes.set(xlabel=_load_label(report), ylabel="requests/s", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _latency(axes: Any, report: BenchReport) -> None:
    rates = [one.throughput for one in report.levels]
    for label, values in (
        ("p50", [one.latency.p50_ms for one in report.levels]),
        ("p99", [one.latency.p99_ms for one in report.levels]),
    ):
        axes.plot(rates, values, "o-", label=label)
    axes.set(xlabel="requests/s", ylabel="ms", yscale="log")
    _plain_numbers(axes)
    axes.legend(frameon=False)


def _percentiles(axes: Any, report: BenchReport) -> None:
    """The axis of percentiles is 1 / (1 - percentile), as HdrHistogram's own plots have it."""
    for one in report.levels:
        if one.latency.count:
            curve = percentile_curve(one.histogram)
            axes.plot([100 / (100 - at) for at, _ in curve], [ms for _, ms in curve], label=str(one.level))
    axes.set(xlabel="percentile", ylabel="ms", xscale="log", yscale="log")
    _plain_numbers(axes)
    axes.set_xticks([100 / (100 - at) for at in _PERCENTILE_TICKS], [f"{at:g}" for at in _PERCENTILE_TICKS])
    axes.minorticks_off()
    axes.legend(frameon=False, title=_load_label(report))


def _plain_numbers(axes: Any) -> None:
    """Write 0.5 instead of a power of ten on the vertical axis, at so few places that no two overlap."""
    low, high = axes.get_ylim()
    axes.set_yticks([one for one in log_ticks(low, high) if low <= one <= high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", left=False, labelleft=False)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from below ``low`` to above ``high``, at most about ten, evenly spread on a log axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    steps = (1, 1.5, 2, 3, 4, 5, 7) if decades <= 1 else (1, 2, 5) if decades <= 3 else (1,)
    stride = max(1, math.ceil(decades / _MOST_DECADES))
    return [step * 10.0**at for at in range(first, last + 1, stride) for step in steps]


def _load_label(report: BenchReport) -> str:
    is_rate = report.levels[0].level.kind is LoadKind.RATE
    return "requests due a second" if is_rate else "requests in flight"
