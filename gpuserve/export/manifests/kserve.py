"""KServe: a ServingRuntime with our container, and an InferenceService that runs it.

KServe in its Standard mode, which has one Deployment a service; Knative lets a pod have one port only. A
runtime can set neither the grace period of a pod nor its security context: the service does. The first port
of the container becomes port 80 of the Service that KServe makes, so HTTP is the first.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.manifests.components import saturation_query
from gpuserve.export.manifests.config_objects import config_object
from gpuserve.export.manifests.pod import PodParts, container, gpu_node, pod_security, spread, volumes
from gpuserve.export.manifests.scaling import SATURATION_TARGET
from gpuserve.export.sizing.ports import GRPC, HEALTH, HTTP, METRICS, container_ports
from gpuserve.export.sizing.values import Reasoned, value_of

#: KServe looks for a container of this name.
CONTAINER: Final = "kserve-container"
#: And takes a port of this name for gRPC.
_PORT_NAMES: Final = {HTTP: "http1", GRPC: "h2c", METRICS: METRICS, HEALTH: HEALTH}
_FORMAT: Final = "gpuserve"


def objects(parts: PodParts, models: list[str]) -> list[dict[str, Any]]:
    """The objects to apply: the config, the runtime, the service."""
    config = config_object(parts.named(parts.config_name), parts.bundle, secret=parts.is_secret)
    return [config, serving_runtime(parts), inference_service(parts, models)]


def serving_runtime(parts: PodParts) -> dict[str, Any]:
    """The ServingRuntime: the pods of a service."""
    annotations = {
        "prometheus.kserve.io/port": str(parts.ports.numbers[METRICS]),
        "prometheus.kserve.io/path": "/metrics",
    }
    protocols = {HTTP: "v2", GRPC: "grpc-v2"}
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": parts.metadata("-runtime"),
        "spec": {
            "annotations": annotations,
            "supportedModelFormats": [{"name": _FORMAT, "version": "1", "autoSelect": False}],
            "protocolVersions": [said for name, said in protocols.items() if name in parts.ports.numbers],
            "multiModel": False,
            "containers": [_container(parts)],
            "volumes": volumes(parts),
            **(gpu_node() if parts.on_gpu else {}),
        },
    }


def _container(parts: PodParts) -> dict[str, Any]:
    """Ours, with the ports in KServe's order and under its names."""
    made = container(parts, CONTAINER)
    ordered = sorted(parts.ports.numbers, key=list(_PORT_NAMES).index)
    numbers = parts.ports.numbers
    made["ports"] = container_ports({_PORT_NAMES[name]: numbers[name] for name in ordered})
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        action = value_of(made[probe]).get("httpGet")
        if action:
            action["port"] = _PORT_NAMES[action["port"]]
    return made


def inference_service(parts: PodParts, models: list[str]) -> dict[str, Any]:
    """The InferenceService: how many pods, scaled by KEDA, and what a runtime cannot say."""
    annotations = {
        "serving.kserve.io/deploymentMode": "Standard",
        "serving.kserve.io/autoscalerClass": "keda",
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": parts.metadata(annotations=annotations),
        "spec": {"predictor": _predictor(parts, models)},
    }


def _predictor(parts: PodParts, models: list[str]) -> dict[str, Any]:
    model: dict[str, Any] = {"modelFormat": {"name": _FORMAT}, "runtime": f"{parts.name}-runtime"}
    return {
        "minReplicas": parts.options.replicas,
        "maxReplicas": parts.options.most_replicas,
        "autoScaling": {"metrics": [_metric(parts, model_name) for model_name in models]},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": parts.sizes.grace_s,
        "securityContext": pod_security(parts),
        **spread(parts, {"serving.kserve.io/inferenceservice": parts.name}),
        "model": model,
    }


def _metric(parts: PodParts, model: str) -> dict[str, Any]:
    selector = f'pod=~"{parts.name}-predictor-.*"'  # pods are scraped by their annotations, there is no job
    metric = {
        "backend": "prometheus",
        "serverAddress": parts.options.prometheus,
        "query": saturation_query(selector, model),
    }
    target = Reasoned(
        f"{SATURATION_TARGET:g}", "For each pod; at 1 every instance is fully busy and nothing waits."
    )
    return {
        "type": "External",
        "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": target}},
    }
