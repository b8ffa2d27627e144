"""The checks of the manifests find what they are for: each is shown one mistake."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from manifest_checks import all_violations
from manifests import DEPLOY, kustomized, of_kind
from pod_security import violations


@pytest.fixture(scope="module")
def built() -> list[dict[str, Any]]:
    return kustomized(DEPLOY / "gpu" / "kubernetes" / "overlays" / "monitoring")


def at(kind: str, *path: str | int) -> Callable[[Any], Any]:
    """The place that is reached by these steps from the first object of a kind."""

    def find(objects: Any) -> Any:
        place = of_kind(objects, kind)[0]
        for step in path:
            place = place[step]
        return place

    return find


POD = ("spec", "template", "spec")
pod = at("Deployment", *POD)


def in_pod(*path: str | int) -> Callable[[Any], Any]:
    return at("Deployment", *POD, *path)


def in_container(*path: str | int) -> Callable[[Any], Any]:
    return in_pod("containers", 0, *path)


def change(place: Callable[[Any], Any], key: Any, value: Any) -> Callable[[Any], None]:
    def make(objects: Any) -> None:
        place(objects)[key] = value

    return make


_OTHERS = {"a": "b"}
_INGRESS = ("spec", "ingress", 0, "ports", 0)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (change(at("PodDisruptionBudget", "spec", "selector"), "matchLabels", _OTHERS), "chooses no pod"),
        (change(at("Service", "spec"), "selector", _OTHERS), "chooses no pod"),
        (change(at("Service", "spec", "ports", 0), "targetPort", "grcp"), "no port grcp"),
        (change(in_container("livenessProbe", "grpc"), "port", 8009), "livenessProbe: no port 8009"),
        (change(in_container("readinessProbe"), "timeoutSeconds", 9), "longer than its period"),
        (change(in_pod("volumes", 1), "name", "memory"), "volumes ["),
        (change(in_container("volumeMounts", 1), "mountPath", "/tmp"), "/tmp is mounted twice"),
        (change(pod, "serviceAccountName", "nobody"), "no ServiceAccount nobody"),
        (change(at("HorizontalPodAutoscaler", "spec"), "minReplicas", 99), "99 pods at least"),
        (change(in_pod("volumes", 0, "configMap"), "name", "other"), "no ConfigMap other"),
        (change(in_pod("volumes", 0, "configMap", "items", 0), "key", "x"), "mounted are"),
        (change(at("NetworkPolicy", *_INGRESS), "port", 1), "nobody may reach grpc"),
        (change(at("ServiceMonitor", "spec", "endpoints", 0), "port", "prom"), "no port prom"),
        (change(at("ServiceMonitor", "spec", "selector"), "matchLabels", {}), "chooses 3 Services"),
    ],
)
def test_what_does_not_fit_together(
    built: list[dict[str, Any]], mistake: Callable[[Any], None], said: str
) -> None:
    objects = copy.deepcopy(built)
    mistake(objects)
    assert any(said in text for text in all_violations(objects))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (change(pod, "hostIPC", True), "hostIPC is set"),
        (change(in_pod("securityContext"), "runAsNonRoot", False), "runAsNonRoot"),
        (change(in_pod("securityContext"), "runAsUser", 0), "root"),
        (change(in_pod("securityContext"), "seccompProfile", {}), "seccompProfile"),
        (
            change(in_container("securityContext"), "allowPrivilegeEscalation", True),
            "allowPrivilege",
        ),
        (change(in_container("securityContext"), "privileged", True), "privileged"),
        (change(in_container("securityContext"), "capabilities", {}), "capabilities"),
        (change(in_pod("volumes", 1), "hostPath", {"path": "/"}), "hostPath"),
        (change(in_container("ports", 0), "hostPort", 80), "hostPort"),
        (change(in_pod("securityContext"), "sysctls", [{"name": "kernel.shmmax"}]), "sysctl"),
    ],
)
def test_what_is_not_restricted(
    built: list[dict[str, Any]], mistake: Callable[[Any], None], said: str
) -> None:
    objects = copy.deepcopy(built)
    mistake(objects)
    assert any(said in text for text in violations(pod(objects)))
