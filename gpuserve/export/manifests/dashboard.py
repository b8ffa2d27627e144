"""The Grafana dashboard: a row for what users see, one for the queue and the instances, one for the GPUs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.export.manifests import metric_names as m

_WIDTH: Final = 24
_HEIGHT: Final = 8
_COLUMNS: Final = 3
#: Grafana refuses a longer one.
_MAX_UID_LENGTH: Final = 40
_HASH_LENGTH: Final = 8
#: What every query is chosen by: the variables at the top of the dashboard.
_POD: Final = 'job=~"$job",pod=~"$pod"'
_MODEL: Final = f'{_POD},model=~"$model"'
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: queries with the legends of their lines, and the unit as Grafana calls it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    explanation: str = ""


def dashboard_text(name: str, *, on_gpu: bool) -> str:
    """The dashboard as indented JSON."""
    return json.dumps(dashboard(name, on_gpu=on_gpu), indent=2) + "\n"


def dashboard(name: str, *, on_gpu: bool) -> dict[str, Any]:
    """The dashboard of everything that is served under this name."""
    rows = [("Requests", _requests()), ("Queue and instances", _instances())]
    if on_gpu:
        rows.append(("GPUs", _gpus()))
    return {
        "uid": _uid(name),
        "title": f"gpuserve: {name}",
        "tags": ["gpuserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(name)},
        "panels": list(_placed(rows)),
    }


def _uid(name: str) -> str:
    """The name, as far as Grafana takes it; a longer one is told apart by a hash."""
    if len(name) <= _MAX_UID_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{name[: _MAX_UID_LENGTH - 1 - _HASH_LENGTH]}-{digest}"


def _variables(name: str) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    job = {"name": "job", "label": "Service", **_choice(f"label_values({m.BUILD}, job)", several=False)}
    chosen = {"current": {"text": f"{name}-metrics", "value": f"{name}-metrics"}}
    return [
        source,
        job | chosen,
        {"name": "pod", "label": "Pod", **_choice(f'label_values({m.BUILD}{{job=~"$job"}}, pod)')},
        {"name": "model", "label": "Model", **_choice(f'label_values({m.WORKER_UP}{{job=~"$job"}}, model)')},
    ]


def _choice(query: str, *, several: bool = True) -> dict[str, Any]:
    more = {
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {"type": "query", "datasource": _SOURCE, "query": query, "refresh": 2, **(more if several else {})}


def _rate(metric: str, by: str, chosen: str = _MODEL, more: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{chosen}{more}}}[$__rate_interval]))"


def _quantile(part: float, metric: str) -> str:
    return f"histogram_quantile({part:g}, {_rate(f'{metric}_bucket', 'le, model')})"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(part, metric), f"p{part * 100:g} {{{{model}}}}") for part in (0.5, 0.9, 0.99))


def _requests() -> Iterator[Panel]:
    yield Panel("Requests answered", "reqps", ((_rate(m.SUCCESSES, "model"), "{{model}}"),))
    yield Panel(
        "Requests failed", "reqps", ((_rate(m.FAILURES, "model, code"), "{{model}} {{code}}"),),
        "INTERNAL: the callable raised; UNAVAILABLE: no instance could take it.",
    )  # fmt: skip
    yield Panel(
        "Requests refused", "reqps", ((_rate(m.REJECTIONS, "model, reason"), "{{model}} {{reason}}"),),
        "queue_full: more came than may wait.",
    )  # fmt: skip
    yield Panel("Time of a request", "s", _quantiles(m.REQUEST_SECONDS), "From acceptance to the answer.")
    yield Panel("Time in the queue", "s", _quantiles(m.QUEUE_SECONDS), "From acceptance to an instance.")
    yield Panel("Time in the callable", "s", _quantiles(m.COMPUTE_SECONDS), "A batch.")


def _instances() -> Iterator[Panel]:
    saturation = f"avg by (model) ({m.SATURATION}{{{_MODEL}}})"
    yield Panel(
        "Saturation", "percentunit", ((saturation, "{{model}}"),),
        "1: every instance is fully busy and nothing waits. The autoscaler goes by the mean of the pods.",
    )  # fmt: skip
    yield Panel(
        "Requests inside", "short",
        (
            (f"sum by (model) ({m.QUEUED}{{{_MODEL}}})", "{{model}} wait"),
            (f"sum by (model) ({m.RUNNING}{{{_MODEL}}})", "{{model}} run"),
        ),
    )  # fmt: skip
    mean = f"{_rate(f'{m.BATCH_ROWS}_sum', 'model')} / {_rate(f'{m.BATCH_ROWS}_count', 'model')}"
    yield Panel("Rows a batch", "short", ((mean, "{{model}}"),))
    yield Panel("Rows inferred", "rowsps", ((_rate(m.ROWS, "model"), "{{model}}"),))
    yield Panel("Instances up", "short", ((f"sum by (model) ({m.WORKER_UP}{{{_MODEL}}})", "{{model}}"),))
    restarts = f"sum by (model, pod) (increase({m.WORKER_RESTARTS}{{{_MODEL}}}[$__rate_interval]))"
    yield Panel("Deaths of instances", "short", ((restarts, "{{model}} {{pod}}"),))
    yield Panel(
        "Memory of inputs",
        "bytes",
        ((f"sum by (model, pod) ({m.ARENA_NBYTES}{{{_MODEL}}})", "{{model}} {{pod}}"),),
    )
    loads = f"max by (model) ({m.WORKER_LOAD_SECONDS}{{{_MODEL}}})"
    yield Panel("Time to load", "s", ((loads, "{{model}}"),), "The longest of the instances.")


def _gpus() -> Iterator[Panel]:
    gpu = "{{pod}} {{device}}"
    yield Panel(
        "Utilization",
        "percentunit",
        ((f"{m.GPU_UTILIZATION}{{{_POD}}}", gpu),),
        "Part of the time that a kernel ran.",
    )
    used = f"{m.GPU_MEMORY_USED}{{{_POD}}} / {m.GPU_MEMORY_TOTAL}{{{_POD}}}"
    yield Panel("Memory", "percentunit", ((used, gpu),))
    yield Panel(
        "Lost or in doubt",
        "short",
        ((f'{m.GPU_STATE}{{{_POD},state!="healthy"}} == 1', f"{gpu} {{{{state}}}}"),),
    )
    yield Panel("Temperature", "celsius", ((f"{m.GPU_TEMPERATURE}{{{_POD}}}", gpu),))
    yield Panel("Power", "watt", ((f"{m.GPU_POWER}{{{_POD}}}", gpu),))
    yield Panel(
        "Batches run in halves",
        "short",
        ((_rate(m.OOM_SPLITS, "model"), "{{model}}"),),
        "Their memory did not suffice.",
    )


def _placed(rows: list[tuple[str, Iterator[Panel]]]) -> Iterator[dict[str, Any]]:
    """The panels with their places, three beside each other, below the title of their row."""
    top, number = 0, 1
    for title, panels in rows:
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _grid(0, top, _WIDTH, 1),
        }
        top, number = top + 1, number + 1
        width, column = _WIDTH // _COLUMNS, 0
        for panel in panels:
            if column == _COLUMNS:
                top, column = top + _HEIGHT, 0
            yield _panel(panel, number, _grid(column * width, top, width, _HEIGHT))
            number, column = number + 1, column + 1
        top += _HEIGHT


def _grid(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int, grid: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for index, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.explanation,
        "datasource": _SOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }
