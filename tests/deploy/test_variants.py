"""What a key or a flag changes in the manifests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from exporting import OPTIONS, export, exported, loaded, written
from manifest_checks import all_violations
from manifests import documents, kustomized, of_kind, only, pod_templates
from pod_security import violations

from gpuserve.cli.export.rendering import kserve_stream, kubernetes_files
from gpuserve.config.load import load_file


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (pod,) = pod_templates(objects)
    found: dict[str, Any] = pod["spec"]["containers"][0]
    return found


def check(objects: list[dict[str, Any]]) -> None:
    """Every variant is as good as the examples are."""
    for one in objects:
        kubernetes_validate.validate(one, "1.30", strict=True)
    assert all_violations(objects) == []
    assert [text for pod in pod_templates(objects) for text in violations(pod["spec"])] == []


def environment(objects: list[dict[str, Any]]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(objects)["env"]}


def test_a_port_for_health_is_asked(tmp_path: Path) -> None:
    objects = exported(tmp_path, health_port=8003)
    check(objects)
    assert container(objects)["readinessProbe"]["grpc"] == {"port": 8003, "service": "readiness"}


def test_without_grpc_the_node_asks_over_http(tmp_path: Path) -> None:
    objects = exported(tmp_path, grpc_port=None)
    check(objects)
    assert container(objects)["startupProbe"]["httpGet"] == {"path": "/v2/health/startup", "port": "http"}
    assert [one["metadata"]["name"] for one in of_kind(objects, "Service")] == ["double", "double-metrics"]


def test_without_http_there_is_only_grpc(tmp_path: Path) -> None:
    objects = exported(tmp_path, http_port=None)
    check(objects)
    assert [one["metadata"]["name"] for one in of_kind(objects, "Service")] == [
        "double-grpc",
        "double-metrics",
    ]


def test_tls_comes_from_a_secret(tmp_path: Path) -> None:
    objects = exported(tmp_path, options={"tls_secret": "certificate"}, tls_ports=["http", "grpc"])
    check(objects)
    assert environment(objects)["GPUSERVE_SERVER__TLS_CERTFILE"] == "/etc/gpuserve-tls/tls.crt"
    (pod,) = pod_templates(objects)
    assert pod["spec"]["volumes"][-1]["secret"]["secretName"] == "certificate"
    assert container(objects)["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": "metrics"}
    http = next(one for one in of_kind(objects, "Service") if one["metadata"]["name"] == "double")
    assert (http["spec"]["ports"][0]["port"], http["spec"]["ports"][0]["appProtocol"]) == (443, "https")


_CLIENT_CA = {"tls_client_ca": "/run/tls/ca.crt"}
_TLS = {"tls_certfile": "/run/tls/tls.crt", "tls_keyfile": "/run/tls/tls.key"}


def test_a_certificate_of_the_pods_need_not_be_here(tmp_path: Path) -> None:
    """The files are those of a Secret, under its own names."""
    config = written(tmp_path, **_TLS, tls_client_ca="/run/tls/ca.crt", health_port=8003)
    done = export("kubernetes", config, "--image", OPTIONS.image)
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    check(objects)
    (pod,) = pod_templates(objects)
    assert pod["spec"]["volumes"][-1]["secret"]["secretName"] == "double-tls"
    assert environment(objects)["GPUSERVE_SERVER__TLS_CLIENT_CA"] == "/etc/gpuserve-tls/ca.crt"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(objects)[probe]["grpc"]["port"] == 8003


def test_prometheus_shows_a_certificate_where_it_is_asked_for_one(tmp_path: Path) -> None:
    schema = json.loads((Path(__file__).parent / "schemas" / "servicemonitor.json").read_text())
    for server, keys in (({}, {"ca", "serverName"}), (_CLIENT_CA, {"ca", "serverName", "cert", "keySecret"})):
        config = written(tmp_path, **_TLS, **server, health_port=8003)
        files = kubernetes_files(load_file(str(config), {}, served_here=False), OPTIONS)
        (monitor,) = documents(files["components/monitoring/servicemonitor.yaml"])
        jsonschema.validate(monitor, schema)
        assert set(monitor["spec"]["endpoints"][0]["tlsConfig"]) == keys


def test_a_port_below_1024_needs_no_root(tmp_path: Path) -> None:
    objects = exported(tmp_path, http_port=80)
    check(objects)
    (pod,) = pod_templates(objects)
    sysctls = [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]
    assert pod["spec"]["securityContext"]["sysctls"] == sysctls


def test_what_the_file_says_is_not_said_again(tmp_path: Path) -> None:
    assert environment(exported(tmp_path))["GPUSERVE_SERVER__LOG_FORMAT"] == "json"
    said = environment(exported(tmp_path, log_format="text", max_connection_age_s=0))
    assert not {name for name in said if name.startswith("GPUSERVE_")}


def test_mig_slices(tmp_path: Path) -> None:
    """A slice is a resource of its own name, and its pods share a node."""
    options = {"gpu_resource": "nvidia.com/mig-1g.10gb", "gpus_per_node": 7}
    objects = exported(tmp_path, {"instances": [{"device": "cuda:0"}]}, options=options)
    check(objects)
    assert container(objects)["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1
    (pod,) = pod_templates(objects)
    assert list(pod["spec"]["affinity"]["podAntiAffinity"]) == [
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]


def test_a_pod_with_every_gpu_is_alone_on_its_node(tmp_path: Path) -> None:
    model = {"instances": [{"device": "cuda:*"}]}
    (pod,) = pod_templates(exported(tmp_path, model, options={"gpus_per_node": 4}))
    assert list(pod["spec"]["affinity"]["podAntiAffinity"]) == [
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]


def test_every_model_with_instances_is_scaled_by(tmp_path: Path) -> None:
    ensemble = {
        "name": "both",
        "callable": None,
        "ensemble": {"steps": [{"model": "first", "inputs": {"x": "x"}, "outputs": {"y": "y"}}]},
    }
    objects = exported(tmp_path, {"name": "first"}, {"name": "second"}, ensemble)
    metrics = only(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]
    names = [one["pods"]["metric"]["selector"]["matchLabels"]["model"] for one in metrics]
    assert names == ["first", "second"]


@pytest.mark.thorough
def test_a_thousand_models(tmp_path: Path) -> None:
    objects = exported(tmp_path, *({"name": f"model-{number}"} for number in range(1000)))
    check(objects)
    assert len(only(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]) == 1000
    assert max(len(json.dumps(one)) for one in objects) < 1 << 20  # etcd takes 1.5 MiB


def test_a_namespace_and_a_number_of_pods(tmp_path: Path) -> None:
    options = {"namespace": "models", "replicas": 3, "max_replicas": 5, "name": "mine"}
    objects = exported(tmp_path, options=options)
    check(objects)
    assert {one["metadata"]["namespace"] for one in objects} == {"models"}
    spec = only(objects, "HorizontalPodAutoscaler")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 5)


def test_kserve_over_http_alone(tmp_path: Path) -> None:
    objects = documents(kserve_stream(loaded(tmp_path, grpc_port=None), OPTIONS))
    runtime = only(objects, "ServingRuntime")["spec"]
    assert runtime["protocolVersions"] == ["v2"]
    assert [port["name"] for port in runtime["containers"][0]["ports"]] == ["http1", "metrics"]
    assert runtime["containers"][0]["livenessProbe"]["httpGet"]["port"] == "http1"
    assert all_violations(objects) == []


def test_every_file_of_an_export_is_built(tmp_path: Path) -> None:
    """The stream on stdout and the base in a folder are the same objects."""
    config, image = written(tmp_path), ("--image", OPTIONS.image)
    done = export("kubernetes", config, *image, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (0, "")
    stream = export("kubernetes", config, *image)
    key = lambda one: (one["kind"], one["metadata"]["name"])  # noqa: E731 - a name for sorting by
    assert sorted(documents(stream.stdout), key=key) == sorted(kustomized(tmp_path / "out" / "base"), key=key)
    assert not kubernetes_files(loaded(tmp_path), OPTIONS).keys() & {"overlays/surge/kustomization.yaml"}


@pytest.mark.parametrize("prometheus", ["http://prometheus:9090"])
def test_keda_asks_the_prometheus_that_is_named(tmp_path: Path, prometheus: str) -> None:
    files = kubernetes_files(loaded(tmp_path), replace(OPTIONS, prometheus=prometheus))
    (scaler,) = documents(files["components/keda/scaledobject.yaml"])
    assert scaler["spec"]["triggers"][0]["metadata"]["serverAddress"] == prometheus


@pytest.mark.parametrize("component", ["daemonset", "keda"])
def test_a_name_that_yaml_has_a_meaning_for_is_a_text_in_patches_too(tmp_path: Path, component: str) -> None:
    files = kubernetes_files(loaded(tmp_path), replace(OPTIONS, name="null"))
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    kinds = {one["kind"] for one in kustomized(tmp_path / "overlays" / component)}
    assert "HorizontalPodAutoscaler" not in kinds
    assert "Deployment" in kinds or "DaemonSet" in kinds


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({}, {"nodeSelector": None, "runtimeClassName": None}),
        ({"gpu_operator": True}, {"nodeSelector": {"nvidia.com/gpu.present": "true"}}),
        (
            {"gpu_product": "NVIDIA-L4", "runtime_class": "nvidia"},
            {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}, "runtimeClassName": "nvidia"},
        ),
    ],
)
def test_pods_select_nodes_by_labels_only_on_request(
    tmp_path: Path, options: dict[str, Any], spec: dict[str, Any]
) -> None:
    objects = exported(tmp_path, {"instances": [{"device": "cuda:0"}]}, options=options)
    (pod,) = pod_templates(objects)
    assert {key: pod["spec"].get(key) for key in spec} == spec
    check(objects)


def test_pods_that_share_gpus(tmp_path: Path) -> None:
    options = {
        "gpu_sharing": "mps",
        "gpu_resource": "nvidia.com/gpu.shared",
        "min_gpu_memory_nbytes": 40 << 30,
    }
    objects = exported(tmp_path, {"instances": [{"device": "cuda:0"}]}, options=options)
    (pod,) = pod_templates(objects)
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu.shared"] == 1
    assert "/dev/shm" not in {one["mountPath"] for one in container["volumeMounts"]}, "the plugin mounts it"
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in pod["spec"]["affinity"]["podAntiAffinity"]
    (term,) = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    (expression,) = term["matchExpressions"]
    assert expression == {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["40959"]}
    check(objects)
