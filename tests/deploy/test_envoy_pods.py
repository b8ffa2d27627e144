"""Envoy in a cluster, by the component ``envoy``: its manifests are as good as those of our pods."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from envoys import fetched, in_front_of
from exporting import OPTIONS, loaded, written
from manifest_checks import all_violations
from manifests import DEPLOY, EXAMPLES, kustomized, of_kind, only, pod_templates
from pod_security import violations

from gpuserve.cli.export.rendering import kubernetes_files

ENVOY = str(Path(sys.executable).with_name("envoy"))


def is_envoys(one: dict[str, Any]) -> bool:
    return one["metadata"].get("labels", {}).get("app.kubernetes.io/name") == "envoy"


def built(folder: Path, options: dict[str, Any] | None = None, **server: Any) -> list[dict[str, Any]]:
    """The overlay ``envoy`` of such a config; for each a folder, since what is built is kept."""
    folder = folder / f"built{len(list(folder.iterdir()))}"
    folder.mkdir()
    files = kubernetes_files(loaded(folder, **server), replace(OPTIONS, **(options or {})))
    for name, text in files.items():
        path = folder / "cluster" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return kustomized(folder / "cluster" / "overlays" / "envoy")


def check(objects: list[dict[str, Any]]) -> None:
    envoys = [one for one in objects if is_envoys(one)]
    for one in envoys:
        kubernetes_validate.validate(one, "1.30", strict=True)
    (pod,) = pod_templates(envoys)
    assert list(violations(pod["spec"])) == []
    accounts = of_kind(objects, "ServiceAccount")
    policies_of_ours = [one for one in envoys if one["metadata"]["name"].endswith("-health")]
    assert all_violations([one for one in envoys if one not in policies_of_ours] + accounts) == []
    assert all_violations([one for one in objects if not is_envoys(one)]) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_hold_together(name: str) -> None:
    objects = kustomized(DEPLOY / name / "kubernetes" / "overlays" / "envoy")
    check(objects)
    base = kustomized(DEPLOY / name / "kubernetes" / "base")
    assert [one for one in objects if not is_envoys(one)] == base


@pytest.mark.parametrize(
    ("options", "server"),
    [
        ({}, {"health_port": 8003}),
        ({"tls_secret": "certificate"}, {"health_port": 8003}),
        ({}, {"http_port": None}),
    ],
)
def test_variants_hold_together(tmp_path: Path, options: dict[str, Any], server: dict[str, Any]) -> None:
    check(built(tmp_path, options, **server))


def test_no_service_of_ours_leads_to_envoy_and_none_of_its_to_us(tmp_path: Path) -> None:
    objects = built(tmp_path)
    labels = {
        is_envoys(one): one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(objects, "Deployment")
    }
    for service in of_kind(objects, "Service"):
        wanted = service["spec"]["selector"].items()
        assert wanted <= labels[is_envoys(service)].items()
        assert not wanted <= labels[not is_envoys(service)].items()


def test_envoy_may_ask_the_port_for_health(tmp_path: Path) -> None:
    objects = built(tmp_path, health_port=8003)
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "NetworkPolicy")}
    (rule,) = policies["double-envoy-health"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [8003]
    assert 8003 in [port["port"] for port in policies["double-envoy"]["egress"][0]["ports"]]
    assert "double-envoy-health" not in str(built(tmp_path))


def test_a_changed_configuration_is_a_changed_pod(tmp_path: Path) -> None:
    def config(objects: list[dict[str, Any]]) -> str:
        envoys = [one for one in objects if is_envoys(one)]
        return str(only(envoys, "ConfigMap")["metadata"]["name"])

    assert config(built(tmp_path)) == config(built(tmp_path)) != config(built(tmp_path, health_port=8003))


@pytest.mark.parametrize("name", EXAMPLES)
def test_envoy_takes_what_its_pods_have(tmp_path: Path, name: str) -> None:
    objects = kustomized(DEPLOY / name / "kubernetes" / "overlays" / "envoy")
    config = only([one for one in objects if is_envoys(one)], "ConfigMap")
    for file, text in config["data"].items():
        (tmp_path / file).write_text(text)
    command = [ENVOY, "--mode", "validate", "-c", str(tmp_path / "envoy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_hook_before_its_end_takes_it_out(tmp_path: Path) -> None:
    with in_front_of(tmp_path / "envoy", written(tmp_path), []) as envoy:
        assert [fetched(envoy.status, path)[0] for path in ("/ready", "/live")] == [200, 200]
        (pod,) = pod_templates([one for one in built(tmp_path) if is_envoys(one)])
        hook = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        script = hook[-1].replace("127.0.0.1/9901", envoy.admin.replace("localhost:", "127.0.0.1/"))
        subprocess.run(
            [*hook[:-1], re.sub(r"sleep \d+", "sleep 0", script)], check=True, stdout=subprocess.DEVNULL
        )
        assert [fetched(envoy.status, path)[0] for path in ("/ready", "/live")] == [503, 200]
