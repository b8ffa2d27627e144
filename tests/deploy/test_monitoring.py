"""Alerts, dashboards and autoscalers ask for metrics that there are, in queries that Prometheus can read."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from exporting import export, written
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from manifests import DEPLOY, EXAMPLES, documents, kustomized, of_kind, only
from serving import GPUSERVE, JSON_LOG, REPOSITORY, serving

TEMPLATES = REPOSITORY / "gpuserve" / "cli" / "export" / "templates"
REFERENCE = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()
_VARIABLES = {"$job": "job", "$pod": "pod", "$model": "model", "$__rate_interval": "5m"}


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The metrics page of a server."""
    config = str(REPOSITORY / "examples" / "linear" / "config.yaml")
    with serving(GPUSERVE, "serve", config, *JSON_LOG) as server:
        url = f"http://{server.metrics}/metrics"
        yield urllib.request.urlopen(url, timeout=10).read().decode()


def queries(name: str) -> Iterator[str]:
    """Every query of an example, with Grafana's variables as Grafana would fill them in."""
    built = kustomized(DEPLOY / name / "kubernetes" / "overlays" / "monitoring")
    for group in only(built, "PrometheusRule")["spec"]["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for text in only_dashboard(built).values():
        for panel in json.loads(text)["panels"]:
            yield from (_filled(target["expr"]) for target in panel.get("targets", ()))
    keda = kustomized(DEPLOY / name / "kubernetes" / "overlays" / "keda")
    yield from (one["metadata"]["query"] for one in only(keda, "ScaledObject")["spec"]["triggers"])
    kserve = only(documents((DEPLOY / name / "kserve.yaml").read_text()), "InferenceService")
    metrics = kserve["spec"]["predictor"]["autoScaling"]["metrics"]
    yield from (one["external"]["metric"]["query"] for one in metrics)


def only_dashboard(built: list[dict[str, Any]]) -> dict[str, str]:
    found = [one for one in of_kind(built, "ConfigMap") if "grafana_dashboard" in one["metadata"]["labels"]]
    assert len(found) == 1
    data: dict[str, str] = found[0]["data"]
    return data


def _filled(query: str) -> str:
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    return query


@pytest.mark.parametrize("name", EXAMPLES)
def test_prometheus_can_read_every_query(name: str) -> None:
    texts = list(queries(name))
    assert len(texts) > 20
    for text in texts:
        assert promql_parser.parse(text)


def test_every_name_is_on_the_metrics_page(served: str) -> None:
    """A server without a GPU does not tell of GPUs, nor one without TLS of a certificate: those names are in
    the reference, which is tested too.
    """
    shown = set(re.findall(r"^# TYPE (\S+)", served, re.MULTILINE))
    asked = {
        name
        for template in TEMPLATES.rglob("*.yaml")
        for name in re.findall(r"gpuserve_[a-z_]+", template.read_text())
    }
    names = {name if name in shown else re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert len(names) > 25
    missing = {name for name in names if name not in shown}
    assert {name for name in missing if not name.startswith("gpuserve_gpu_")} == {
        "gpuserve_certificate_expiry_seconds"
    }
    assert all(f"`{name}`" in REFERENCE for name in missing)


@pytest.mark.parametrize("name", EXAMPLES)
def test_alerts_use_labels_that_their_query_gives(name: str) -> None:
    """What a query sums up over has no label any more."""
    for group in documents((DEPLOY / name / "alerts.yaml").read_text())[0]["spec"]["groups"]:
        for rule in group["rules"]:
            used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
            kept = re.findall(r"by \(([\w, ]+)\)", rule["expr"])
            if kept:
                assert used <= set(kept[0].split(", ")), rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_dashboard_has_room_for_every_panel(name: str) -> None:
    dashboard = json.loads((DEPLOY / name / "dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert ("GPUs" in [panel["title"] for panel in dashboard["panels"]]) == (name == "gpu")


#: What has to be noticed, and the metric by which it is.
_NOTICED = {
    "GpuserveInstanceRestarts": "gpuserve_worker_restarts_total",
    "GpuserveModelDown": "gpuserve_worker_up",
    "GpuserveSlowQueue": "gpuserve_queue_duration_seconds",
    "GpuserveArenaFull": "gpuserve_arena_bytes",
    "GpuserveGpuLost": "gpuserve_gpu_state",
    "GpuserveQueueFull": "gpuserve_rejected_total",
    "GpuserveCertificateExpiry": "gpuserve_certificate_expiry_seconds",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_has_to_be_noticed_is(name: str) -> None:
    (group,) = documents((DEPLOY / name / "alerts.yaml").read_text())[0]["spec"]["groups"]
    found = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    wanted = {alert for alert in _NOTICED if "Gpu" not in alert[len("Gpuserve") :] or name == "gpu"}
    assert wanted <= found.keys()
    assert all(_NOTICED[alert] in found[alert] for alert in wanted)


@pytest.mark.parametrize("name", EXAMPLES)
def test_grafana_knows_every_key_of_the_dashboard(name: str) -> None:
    """What Grafana's own types read of it and write again has lost nothing, and changed nothing."""
    dashboard = json.loads((DEPLOY / name / "dashboard.json").read_text())
    assert list(_lost(dashboard, _as_grafana_has_it(dashboard), "dashboard")) == []
    dashboard["panels"][1]["grid"] = dashboard["panels"][1].pop("gridPos")
    assert list(_lost(dashboard, _as_grafana_has_it(dashboard), "dashboard")) == ["dashboard.panels[1].grid"]


def _as_grafana_has_it(dashboard: dict[str, Any]) -> Any:
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def _lost(given: Any, read: Any, path: str) -> Iterator[str]:
    """Where the second is not all that the first is; it may have more, which are defaults."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            yield from _lost(value, read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"]
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, value in enumerate(given):
            yield from _lost(value, read[index], f"{path}[{index}]")
    elif given != read:
        yield path


def test_the_longest_name_is_short_enough_for_grafana(tmp_path: Path) -> None:
    names = ["m" * 44 + end for end in "ab"] + ["m" * 40]
    uids = [json.loads(export("grafana", written(tmp_path), "--name", one).stdout)["uid"] for one in names]
    assert len(set(uids)) == 3
    assert all(len(one) <= 40 for one in uids)
    assert uids[2] == names[2]


def test_exports_without_pods_need_no_image(tmp_path: Path) -> None:
    config = written(tmp_path)
    dashboard = export("grafana", config)
    assert json.loads(dashboard.stdout)["uid"] == "double"
    alerts = export("alerts", config, "--namespace", "models", "--out", tmp_path)
    assert alerts.returncode == 0
    (rule,) = documents((tmp_path / "alerts.yaml").read_text())
    assert 'namespace="models"' in rule["spec"]["groups"][0]["rules"][0]["expr"]
