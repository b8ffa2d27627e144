"""A server with Prometheus and Grafana for Docker Compose: the files fit each other and the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from exporting import export
from manifests import DEPLOY
from serving import GPUSERVE, JSON_LOG, REPOSITORY, serving

COMPOSE = DEPLOY / "compose"
LINEAR = str(REPOSITORY / "examples" / "linear" / "config.yaml")


def read(name: str, folder: Path = COMPOSE) -> Any:
    return yaml.safe_load((folder / name).read_text())


def test_every_file_that_a_container_is_given_is_there() -> None:
    services = read("compose.yaml")["services"]
    assert set(services) == {"gpuserve", "prometheus", "grafana"}
    mounts = [mount.split(":")[0] for one in services.values() for mount in one["volumes"]]
    volumes = read("compose.yaml")["volumes"]
    assert all((COMPOSE / one).exists() for one in mounts if one not in volumes)
    assert (COMPOSE / mounts[0] / "config.yaml").is_file()
    assert services["gpuserve"]["command"] == ["serve", "/models/config.yaml"]


def test_only_the_server_is_reached_from_elsewhere() -> None:
    services = read("compose.yaml")["services"]
    assert services["gpuserve"]["ports"] == ["8001:8001", "8000:8000"]
    for name in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])


def test_rules_and_dashboard_ask_for_what_prometheus_scrapes() -> None:
    (scraped,) = read("prometheus.yaml")["scrape_configs"]
    assert scraped["honor_labels"] is True, "the metrics have a label 'instance' of their own"
    assert {"target_label": "pod", "source_labels": ["__address__"]} in scraped["relabel_configs"]
    rules = [rule for group in read("rules.yaml")["groups"] for rule in group["rules"]]
    assert len(rules) > 5
    for rule in rules:
        promql_parser.parse(rule["expr"])
        assert f'job="{scraped["job_name"]}"' in rule["expr"]
    (source,) = read("grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert json.loads((COMPOSE / "dashboard.json").read_text())["panels"]


def test_plain_rules_are_those_of_the_operator() -> None:
    plain, operated = (yaml.safe_load(export("alerts", LINEAR, *more).stdout) for more in (["--plain"], []))
    assert plain == operated["spec"]


def test_the_health_of_a_container_is_that_of_its_server() -> None:
    check = read("compose.yaml")["services"]["gpuserve"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python3", "-c"]
    with serving(GPUSERVE, "serve", LINEAR, *JSON_LOG) as server:
        program = check[3].replace("localhost:8000", server.http)
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 1


def test_a_gpu_is_asked_for_where_the_config_has_one(tmp_path: Path) -> None:
    config = str(DEPLOY / "gpu" / "config.yaml")
    export("compose", config, "--image", "my/models:1", "--mount", "/srv/models", "--out", str(tmp_path))
    server = read("compose.yaml", tmp_path)["services"]["gpuserve"]
    assert server["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
    assert server["volumes"] == ["/srv/models:/models:ro"]


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--image", "my/models:latest"), "latest"), (("--image", "no image"), "no image")],
)
def test_what_cannot_run_is_refused(options: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = export("compose", LINEAR, *options, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert named in done.stderr
    assert not (tmp_path / "out").exists()
