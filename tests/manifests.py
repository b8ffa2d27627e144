"""Reads rendered manifests for tests, as ``kubectl kustomize`` builds them. No test is here."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from serving import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
EXAMPLES = ("quickstart", "gpu")
KUBECTL = str(Path(sys.executable).with_name("kubectl"))
#: Kinds that have a pod template.
WORKLOADS = ("Deployment", "DaemonSet")


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a stream."""
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None]


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """The objects that ``kubectl apply -k`` would send."""
    return documents(_built(folder))


@functools.cache
def _built(folder: Path) -> str:
    built = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return built.stdout


def kustomizations(root: Path) -> list[Path]:
    """The base and every overlay of a rendered example whose pods are ours; Envoy has tests of its own."""
    overlays = sorted((root / "overlays").iterdir())
    return [root / "base", *(one for one in overlays if one.name != "envoy")]


def of_kind(objects: Iterable[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] in kinds]


def only(objects: Iterable[dict[str, Any]], *kinds: str) -> dict[str, Any]:
    """The one object of these kinds."""
    found = of_kind(objects, *kinds)
    assert len(found) == 1, [one["kind"] for one in objects]
    return found[0]


def pod_templates(objects: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every pod that the objects would start, as ``{"metadata", "spec"}``; KServe's is put together here."""
    objects = list(objects)
    for one in of_kind(objects, *WORKLOADS):
        yield one["spec"]["template"]
    for service in of_kind(objects, "InferenceService"):
        yield kserve_pod(only(objects, "ServingRuntime"), service)


def kserve_pod(runtime: dict[str, Any], service: dict[str, Any]) -> dict[str, Any]:
    """The pod that KServe makes of a runtime and of what a service adds."""
    own = {"supportedModelFormats", "protocolVersions", "multiModel", "annotations"}
    added = {"minReplicas", "maxReplicas", "autoScaling", "model"}
    spec = {key: value for key, value in runtime["spec"].items() if key not in own}
    predictor = service["spec"]["predictor"]
    spec |= {key: value for key, value in predictor.items() if key not in added}
    return {"metadata": {"labels": service["metadata"]["labels"]}, "spec": spec}
