"""The Grafana dashboard: a row for what users see, one for the queue and the instances, one for the GPUs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

from gpuserve.export.templates.filling import filled

_WIDTH: Final = 24
_HEIGHT: Final = 8
_COLUMNS: Final = 3
#: Grafana refuses a longer one.
_MAX_UID_LENGTH: Final = 40
_HASH_LENGTH: Final = 8
#: What every query is chosen by: the variables at the top of the dashboard.
_PODS: Final = 'job=~"$job",pod=~"$pod"'
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_text(name: str, *, on_gpu: bool) -> str:
    """The dashboard of everything that is served under this name, as indented JSON."""
    places = {
        "name": name,
        "uid": _uid(name),
        "on_gpu": on_gpu,
        "source": _SOURCE,
        "of_pods": _PODS,
        "chosen": f'{_PODS},model=~"$model"',
        "quantiles": [{"part": percent / 100, "percent": percent} for percent in (50, 90, 99)],
    }
    (made,) = filled("dashboard.yaml", places)
    return json.dumps({**made["dashboard"], "panels": list(_placed(made["rows"]))}, indent=2) + "\n"


def _uid(name: str) -> str:
    """The name, as far as Grafana takes it; a longer one is told apart by a hash."""
    if len(name) <= _MAX_UID_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{name[: _MAX_UID_LENGTH - 1 - _HASH_LENGTH]}-{digest}"


def _placed(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The panels with their places, three beside each other, below the title of their row."""
    top, number, width = 0, 1, _WIDTH // _COLUMNS
    for row in rows:
        grid = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
        title = {"type": "row", "title": row["title"], "collapsed": False, "panels": []}
        yield {"id": number, **title, "gridPos": grid}
        for index, panel in enumerate(row["panels"]):
            line, column = divmod(index, _COLUMNS)
            grid = {"x": column * width, "y": top + 1 + line * _HEIGHT, "w": width, "h": _HEIGHT}
            yield _panel(panel, number + 1 + index, grid)
        number += 1 + len(row["panels"])
        top = grid["y"] + _HEIGHT


def _panel(panel: dict[str, Any], number: int, grid: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": line["query"],
            "legendFormat": line["legend"],
        }
        for index, line in enumerate(panel["lines"])
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel["title"],
        "description": panel.get("description", ""),
        "datasource": _SOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }
