"""The manifests in deploy/: kustomize builds them, Kubernetes knows every key, and they fit together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from manifest_checks import all_violations
from manifests import DEPLOY, EXAMPLES, documents, kustomizations, kustomized, of_kind, only, pod_templates
from pod_security import violations

from gpuserve.cli.export.pod_sizing import PROPAGATION_S, STOP_MARGIN_S, parse_nbytes
from gpuserve.config.settings.server import TERMINATED_LAME_DUCK_S

#: preStop.sleep is on since this version.
OLDEST = "1.30"
_NEWER_KEYS = frozenset({"sleep", "unhealthyPodEvictionPolicy"})
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
SCHEMAS = Path(__file__).parent / "schemas"
BUILDS = [
    pytest.param(folder, id=f"{name}-{folder.name}")
    for name in EXAMPLES
    for folder in kustomizations(DEPLOY / name / "kubernetes")
] + [pytest.param(DEPLOY / name / "kserve.yaml", id=f"{name}-kserve") for name in EXAMPLES]


def objects_of(source: Path) -> list[dict[str, Any]]:
    return kustomized(source) if source.is_dir() else documents(source.read_text())


@pytest.fixture
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The objects of one of ``BUILDS``."""
    return objects_of(request.param)


of_builds = pytest.mark.parametrize("objects", BUILDS, indirect=True)


@pytest.fixture(scope="module")
def different() -> list[dict[str, Any]]:
    """Every object and every pod of all builds, once."""
    found: dict[str, dict[str, Any]] = {}
    for build in BUILDS:
        built = objects_of(build.values[0])  # type: ignore[arg-type]  # a Path
        found |= {json.dumps(one, sort_keys=True): one for one in [*built, *_pods(built)]}
    return list(found.values())


@pytest.mark.thorough
@pytest.mark.parametrize("version", [OLDEST, ".".join(kubernetes_validate.latest_version().split(".")[:2])])
def test_kubernetes_knows_every_key(different: list[dict[str, Any]], version: str) -> None:
    own = [one for one in different if _is_of_kubernetes(one)]
    if version == OLDEST:
        own = [one for one in own if not _uses_claims(one)]
    assert len(own) > 20
    for one in own:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_oldest_that_there_is_a_schema_of_lacks_two_keys_only(different: list[dict[str, Any]]) -> None:
    """With a preStop hook of one's own they run there as well."""
    folders = (Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema").iterdir()
    versions = {tuple(map(int, found.groups())) for one in folders if (found := _VERSION.match(one.name))}
    oldest = "{}.{}".format(*min(versions))

    def validate(missing: frozenset[str]) -> None:
        for one in different:
            if _is_of_kubernetes(one) and not _uses_claims(one):
                kubernetes_validate.validate(_without(one, missing), oldest, strict=True)

    validate(_NEWER_KEYS)
    for key in _NEWER_KEYS:
        with pytest.raises(kubernetes_validate.ValidationError, match=key):
            validate(_NEWER_KEYS - {key})


def _without(tree: Any, keys: frozenset[str]) -> Any:
    if isinstance(tree, dict):
        return {key: _without(value, keys) for key, value in tree.items() if key not in keys}
    return [_without(one, keys) for one in tree] if isinstance(tree, list) else tree


def _is_of_kubernetes(one: dict[str, Any]) -> bool:
    group = one["apiVersion"].rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


def _uses_claims(one: dict[str, Any]) -> bool:
    """Whether an object is of the component ``dra``, which needs Kubernetes 1.34."""
    return "ResourceClaimTemplate" in (text := json.dumps(one)) or "resourceClaims" in text


def _pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pods as objects, which checks what is only a part of a custom resource as well."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod", **one["metadata"]},
            "spec": one["spec"],
        }
        for one in pod_templates(objects)
    ]


@of_builds
def test_custom_resources_have_known_keys(objects: list[dict[str, Any]]) -> None:
    known = {path.stem: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    for one in objects:
        if one["kind"].lower() in known:
            jsonschema.validate(one, known[one["kind"].lower()])
        else:
            assert _is_of_kubernetes(one), one["kind"]


@of_builds
def test_the_pods_are_restricted(objects: list[dict[str, Any]]) -> None:
    pods = list(pod_templates(objects))
    assert len(pods) == 1
    assert list(violations(pods[0]["spec"])) == []


@of_builds
def test_what_is_named_is_there(objects: list[dict[str, Any]]) -> None:
    assert all_violations(objects) == []


@of_builds
def test_the_arithmetic(objects: list[dict[str, Any]]) -> None:
    """Grace periods hold what happens in them, and memory what lies in it."""
    (pod,) = pod_templates(objects)
    (container,) = pod["spec"]["containers"]
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    drain = 45 if "cuda" in container["image"] else 30
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == PROPAGATION_S - TERMINATED_LAME_DUCK_S
    assert grace == PROPAGATION_S + drain + STOP_MARGIN_S
    memory = parse_nbytes(container["resources"]["limits"]["memory"])
    volumes = [one["emptyDir"] for one in pod["spec"]["volumes"] if "emptyDir" in one]
    in_memory = sum(parse_nbytes(one["sizeLimit"]) for one in volumes if one.get("medium") == "Memory")
    assert in_memory < memory
    disk = sum(parse_nbytes(one["sizeLimit"]) for one in volumes if "medium" not in one)
    assert disk < parse_nbytes(container["resources"]["limits"]["ephemeral-storage"])
    assert parse_nbytes(container["resources"]["requests"]["memory"]) <= memory


@of_builds
def test_a_gpu_pod_is_guaranteed(objects: list[dict[str, Any]]) -> None:
    """What has the same requests as limits may have cores of its own; an example without a GPU has none."""
    (pod,) = pod_templates(objects)
    resources = pod["spec"]["containers"][0]["resources"]
    gpus = resources["limits"].pop("nvidia.com/gpu", 0)
    if "cuda" in pod["spec"]["containers"][0]["image"]:
        assert gpus == (0 if resources.pop("claims", ()) else 8)
        assert resources["limits"] == resources["requests"]
    else:
        assert gpus == 0
    assert "nodeSelector" not in pod["spec"], "the request for the resource finds the nodes"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_overlays_change_what_they_are_named_after(name: str) -> None:
    root = DEPLOY / name / "kubernetes"
    base = {one["kind"] for one in kustomized(root / "base")}
    daemonset = {one["kind"] for one in kustomized(root / "overlays" / "daemonset")}
    assert daemonset == base - {"Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget"} | {
        "DaemonSet"
    }
    keda = {one["kind"] for one in kustomized(root / "overlays" / "keda")}
    assert keda == base - {"HorizontalPodAutoscaler"} | {"ScaledObject"}
    monitoring = {one["kind"] for one in kustomized(root / "overlays" / "monitoring")}
    assert monitoring == base | {"ServiceMonitor", "PrometheusRule"}


def test_the_surge_overlay_keeps_every_pod() -> None:
    root = DEPLOY / "gpu" / "kubernetes"
    before = only(kustomized(root / "base"), "Deployment")["spec"]["strategy"]["rollingUpdate"]
    after = only(kustomized(root / "overlays" / "surge"), "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert (before, after) == ({"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 1, "maxUnavailable": 0})


def test_a_root_that_can_be_written_is_an_overlay() -> None:
    root = DEPLOY / "gpu" / "kubernetes"
    for overlay, read_only in (("base", True), ("overlays/writable-root", False)):
        (pod,) = pod_templates(kustomized(root / overlay))
        assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is read_only


def test_components_go_together(tmp_path: Path) -> None:
    """A user's own overlay takes several of them."""
    root = DEPLOY / "gpu" / "kubernetes"
    (tmp_path / "kubernetes").symlink_to(root, target_is_directory=True)
    parts = "\n".join(f"- kubernetes/components/{name}" for name in ("surge", "keda", "monitoring"))
    kustomization = f"namespace: models\nresources:\n- kubernetes/base\ncomponents:\n{parts}\n"
    (tmp_path / "kustomization.yaml").write_text(kustomization)
    objects = kustomized(tmp_path)
    assert {one["metadata"]["namespace"] for one in objects} == {"models"}
    assert of_kind(objects, "ScaledObject", "ServiceMonitor")
    assert all_violations(objects) == []


#: Numbers that are no choice of an export: they repeat a port of the config, or a user of the image.
_REPEATED = {"containerPort", "port", "runAsGroup", "fsGroup", "weight"}
_NUMBER = re.compile(r"(?:- )?(\w+): \"?\d[\d.]*(?:Ki|Mi|Gi|m|s)?\"?")


def unexplained(text: str) -> set[str]:
    """Keys of numbers that have no comment, neither above themselves nor above anything they are in."""
    found: set[str] = set()
    explained: list[tuple[int, bool]] = []  # by indentation, from the outside
    above = False
    for line in text.splitlines():
        indentation = len(line) - len(line.lstrip(" "))
        if line.lstrip().startswith("#"):
            above = True
            continue
        while explained and explained[-1][0] >= indentation:
            explained.pop()
        why = above or any(one for _, one in explained)
        explained.append((indentation, why))
        if line.lstrip().startswith("- "):
            explained.append((indentation + 1, why))
        number = _NUMBER.fullmatch(line.strip())
        if number is not None and not why:
            found.add(number[1])
        above = False
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_number_says_why(name: str) -> None:
    files = [
        path
        for path in (DEPLOY / name / "kubernetes").rglob("*.yaml")
        if path.parent.name in ("base", "keda", "surge", "monitoring")
        and path.name not in ("config.yaml", "dashboard.yaml", "prometheusrule.yaml", "kustomization.yaml")
    ]
    assert len(files) > 7
    assert set().union(*(unexplained(path.read_text()) for path in files)) <= _REPEATED
    assert unexplained("a: 1\n# Why.\nb:\n  c: 2\nd: 3Gi\n") == {"a", "d"}
