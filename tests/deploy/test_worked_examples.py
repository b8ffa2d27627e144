"""The worked examples of docs/kubernetes.md are what they say: exported, built, checked as the manifests are.

An example is a section with a kustomization. Its YAML blocks name their file in the first line, and its
``gpuserve export`` runs as it stands; without a ``config.yaml`` of its own it is about deploy/gpu.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from exporting import export
from manifest_checks import all_violations
from manifests import DEPLOY, kustomized, of_kind, only, pod_templates
from pod_security import violations
from serving import REPOSITORY
from typer.testing import CliRunner

from gpuserve.cli.app import build_app

TEXT = (REPOSITORY / "docs" / "kubernetes.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in TEXT.split("\n## ")[1:]}
EXAMPLES = [name for name, part in SECTIONS.items() if "# kustomization.yaml\n" in part]


def built(section: str, folder: Path) -> list[dict[str, Any]]:
    """The objects that the example of a section applies."""
    for name in ("config.yaml", "projection.py"):
        shutil.copy(DEPLOY / "gpu" / name, folder)
    for name, text in re.findall(
        r"^```yaml\n# ([\w.]+)\n(.*?)^```$", SECTIONS[section], re.DOTALL | re.MULTILINE
    ):
        (folder / name).write_text(text)
    commands = re.findall(r"\$ (gpuserve export kubernetes (?:.*\\\n)*.*)", SECTIONS[section])
    assert len(commands) == 1
    done = export(*shlex.split(commands[0].replace("\\\n", " "))[2:])
    assert done.returncode == 0, done.stderr
    return kustomized(folder)


@pytest.fixture(params=EXAMPLES)
def example(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[dict[str, Any]]]:
    monkeypatch.chdir(tmp_path)
    return request.param, built(request.param, tmp_path)


def test_there_are_examples() -> None:
    assert EXAMPLES == [
        "A pool of GPU nodes, from nothing", "MIG", "Weights on a volume", "TLS and tokens",
        "Clients with shared memory",
    ]  # fmt: skip


def test_an_example_is_what_it_says(example: tuple[str, list[dict[str, Any]]]) -> None:
    section, objects = example
    own = [
        one
        for one in objects
        if "." not in one["apiVersion"].split("/")[0] or ".k8s.io/" in one["apiVersion"]
    ]
    for one in own:
        for version in ("1.30", ".".join(kubernetes_validate.latest_version().split(".")[:2])):
            kubernetes_validate.validate(one, version, strict=True)
    assert all_violations(objects) == []
    (pod,) = pod_templates(objects)
    assert list(violations(pod["spec"])) == []
    assert {one["metadata"]["namespace"] for one in objects if one["kind"] != "Namespace"} == {"models"}
    _ABOUT[section](objects, pod["spec"])


def _pool(objects: list[dict[str, Any]], pod: dict[str, Any]) -> None:
    assert only(objects, "Namespace")["metadata"]["name"] == "models"
    assert pod["nodeSelector"] == {
        "nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    }  # fmt: skip
    assert only(objects, "Deployment")["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 1


def _mig(objects: list[dict[str, Any]], pod: dict[str, Any]) -> None:
    limits = pod["containers"][0]["resources"]["limits"]
    assert {key: value for key, value in limits.items() if "/" in key} == {"nvidia.com/mig-1g.10gb": 1}
    assert only(objects, "HorizontalPodAutoscaler")["spec"]["maxReplicas"] == 56


def _weights(objects: list[dict[str, Any]], pod: dict[str, Any]) -> None:
    (volume,) = [one for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert (
        volume["persistentVolumeClaim"]["claimName"]
        == only(objects, "PersistentVolumeClaim")["metadata"]["name"]
    )


def _tls(objects: list[dict[str, Any]], pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert {container[f"{probe}Probe"]["grpc"]["port"] for probe in ("startup", "readiness", "liveness")} == {
        8003
    }
    assert any(one["name"] == "GPUSERVE_SERVER__TLS_CLIENT_CA" for one in container["env"])
    certificate = only(objects, "Certificate")["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "tls"]
    assert volume["secret"]["secretName"] == certificate["secretName"]
    services = {one["metadata"]["name"] for one in of_kind(objects, "Service")} - {"projection-metrics"}
    assert {
        f"{name}{rest}" for name in services for rest in ("", ".models", ".models.svc.cluster.local")
    } == set(certificate["dnsNames"])
    assert "scheme" not in only(objects, "ServiceMonitor")["spec"]["endpoints"][0]


def _sidecar(objects: list[dict[str, Any]], pod: dict[str, Any]) -> None:
    assert {one["kind"] for one in objects} >= {"Deployment", "ConfigMap"}
    assert len(pod["containers"]) == 2
    for one in pod["containers"]:
        assert {"name": "shm", "mountPath": "/dev/shm"} in one["volumeMounts"]
        assert one["resources"]["requests"].items() <= one["resources"]["limits"].items()
    (volume,) = [one for one in pod["volumes"] if one["name"] == "shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


_ABOUT = {
    "A pool of GPU nodes, from nothing": _pool,
    "MIG": _mig,
    "Weights on a volume": _weights,
    "TLS and tokens": _tls,
    "Clients with shared memory": _sidecar,
}


def test_every_block_of_yaml_is_yaml() -> None:
    blocks = re.findall(r"^ *```yaml\n(.*?)^ *```$", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 10
    assert all(yaml.safe_load(block) for block in blocks)


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"`((?:tests|docs|benchmarks|scripts|examples)/[\w./]+)`", TEXT))
    assert len(named) > 10
    assert {name for name in named if not (REPOSITORY / name).exists()} == set()


def test_every_alert_that_is_named_is_there() -> None:
    there = (DEPLOY / "gpu" / "alerts.yaml").read_text()
    named = set(re.findall(r"`(Gpuserve\w+)`", TEXT))
    assert len(named) > 3
    assert {name for name in named if f"alert: {name}\n" not in there} == set()


def test_every_verb_of_an_exec_is_there() -> None:
    verbs = set(re.findall(r"`gpuserve (\w+)", SECTIONS["Operate it"])) | {"status"}
    assert verbs >= {"status", "drain", "reload", "scale", "load", "unload", "devices"}
    for verb in verbs:
        assert CliRunner().invoke(build_app(), [verb, "--help"]).exit_code == 0, verb
