"""What the stand-in kubelet reads of rendered YAML: that of ``deploy/``, and what it cannot do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from manifests import DEPLOY, kustomized

from benchmarks.rollout.manifest import ManifestError, Strategy, read, strategy
from benchmarks.rollout.probes import ExecAction, GrpcAction, HttpAction, TcpAction


@pytest.fixture
def objects() -> list[dict[str, Any]]:
    return copy.deepcopy(kustomized(DEPLOY / "quickstart/kubernetes/base"))


def deployment(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = next(one["spec"] for one in objects if one["kind"] == "Deployment")
    return found


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = deployment(objects)["template"]["spec"]["containers"][0]
    return found


def test_the_rendered_example_is_read_as_it_says(objects: list[dict[str, Any]]) -> None:
    manifest = read(objects)
    said = container(objects)
    assert (manifest.replicas, manifest.strategy, manifest.max_disrupted) == (2, Strategy(1, 0), 1)
    assert manifest.min_ready_s == deployment(objects)["minReadySeconds"]
    assert manifest.template.grace_s == 60.0
    assert manifest.template.release.startswith("quickstart-config-")
    found = manifest.template.container
    assert found.command == ("gpuserve", "serve", "/etc/gpuserve/config.yaml")
    assert found.ports == {"grpc": 8001, "http": 8000, "metrics": 8002}
    assert found.pre_stop_s == said["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert found.environment["GPUSERVE_SERVER__MAX_CONNECTION_AGE_S"] == "300"
    assert found.empty_folders == ("/tmp",)
    assert b"class ContentType" in found.files["/etc/gpuserve/content_type.py"]


def test_the_three_probes_have_the_numbers_of_the_yaml(objects: list[dict[str, Any]]) -> None:
    found = read(objects).template.container
    assert found.startup
    assert found.readiness
    assert found.liveness
    assert found.startup.action == GrpcAction(8001, "startup")
    assert (found.readiness.period_s, found.readiness.timeout_s, found.readiness.failure_threshold) == (
        2,
        1,
        2,
    )
    assert (found.liveness.grace_s, found.readiness.grace_s) == (10.0, None)


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ({"httpGet": {"port": "http", "path": "/v2/health/ready"}}, HttpAction(8000, "/v2/health/ready")),
        ({"httpGet": {"port": 8003}}, HttpAction(8003, "/")),
        ({"tcpSocket": {"port": "grpc"}}, TcpAction(8001)),
        ({"exec": {"command": ["true"]}}, ExecAction(("true",))),
    ],
)
def test_other_probes_with_the_defaults_of_the_api(
    objects: list[dict[str, Any]], said: Mapping[str, Any], action: object
) -> None:
    container(objects)["readinessProbe"] = said
    probe = read(objects).template.container.readiness
    assert probe is not None
    assert probe.action == action
    assert (probe.period_s, probe.timeout_s, probe.failure_threshold, probe.success_threshold) == (
        10,
        1,
        3,
        1,
    )


@pytest.mark.parametrize(
    ("rolling", "replicas", "expected"),
    [
        ({"maxSurge": 1, "maxUnavailable": 0}, 4, Strategy(1, 0)),
        ({"maxSurge": 0, "maxUnavailable": 1}, 4, Strategy(0, 1)),
        ({}, 5, Strategy(2, 1)),
        ({"maxSurge": "30%", "maxUnavailable": "30%"}, 4, Strategy(2, 1)),
        ({"maxSurge": 0, "maxUnavailable": "10%"}, 4, Strategy(0, 1)),
    ],
)
def test_surge_is_rounded_up_and_what_may_be_missing_down(
    rolling: dict[str, Any], replicas: int, expected: Strategy
) -> None:
    assert strategy({"type": "RollingUpdate", "rollingUpdate": rolling}, replicas) == expected


def change(where: str, objects: list[dict[str, Any]]) -> None:
    one = container(objects)
    if where == "preStop":
        one["lifecycle"]["preStop"] = {"exec": {"command": ["sleep", "1"]}}
    elif where == "probe":
        one["livenessProbe"] = {"httpGet": {"port": 8000, "scheme": "HTTPS"}}
    elif where == "env":
        one["env"].append({"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    elif where == "container":
        deployment(objects)["template"]["spec"]["containers"].append(one)
    elif where == "strategy":
        deployment(objects)["strategy"] = {"type": "Recreate"}
    else:
        objects[:] = [one for one in objects if one["kind"] != "Deployment"]


@pytest.mark.parametrize("where", ["preStop", "probe", "env", "container", "strategy", "Deployment"])
def test_what_it_cannot_do_is_refused_by_its_name(objects: list[dict[str, Any]], where: str) -> None:
    change(where, objects)
    with pytest.raises(ManifestError, match=where):
        read(objects)
