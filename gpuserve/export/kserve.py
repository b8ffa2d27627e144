"""KServe: a ServingRuntime with our container, and an InferenceService that runs it.

KServe in its Standard mode, which has one Deployment a service; Knative lets a pod have one port only. A
runtime can set neither the grace period of a pod nor its security context: the service does. The first port
of the container becomes port 80 of the Service that KServe makes, so HTTP is the first.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.components import saturation_query
from gpuserve.export.config_objects import config_object
from gpuserve.export.pod import Parts, container, gpu_node, pod_security, spread, volumes
from gpuserve.export.ports import GRPC, HEALTH, HTTP, METRICS
from gpuserve.export.reasoned import Reasoned, value_of
from gpuserve.export.scaling import SATURATION_TARGET

#: KServe looks for a container of this name.
CONTAINER: Final = "kserve-container"
#: And takes a port of this name for gRPC.
_PORT_NAMES: Final = {HTTP: "http1", GRPC: "h2c", METRICS: METRICS, HEALTH: HEALTH}
_FORMAT: Final = "gpuserve"


def objects(parts: Parts, models: list[str]) -> list[dict[str, Any]]:
    """What is applied: the config, the runtime, the service."""
    config = config_object(parts.named(parts.config_name), parts.bundle, secret=parts.is_secret)
    return [config, serving_runtime(parts), inference_service(parts, models)]


def serving_runtime(parts: Parts) -> dict[str, Any]:
    """How the pods of a service look."""
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


def _container(parts: Parts) -> dict[str, Any]:
    """Ours, with the ports in KServe's order and under its names."""
    made = container(parts, CONTAINER)
    ordered = sorted(parts.ports.numbers, key=list(_PORT_NAMES).index)
    numbers = parts.ports.numbers
    made["ports"] = [
        {"name": _PORT_NAMES[name], "containerPort": numbers[name], "protocol": "TCP"} for name in ordered
    ]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        action = value_of(made[probe]).get("httpGet")
        if action:
            action["port"] = _PORT_NAMES[action["port"]]
    return made


def inference_service(parts: Parts, models: list[str]) -> dict[str, Any]:
    """The service: how many pods, scaled by KEDA as KServe writes that, and what a runtime cannot say."""
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


def _predictor(parts: Parts, models: list[str]) -> dict[str, Any]:
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


def _metric(parts: Parts, model: str) -> dict[str, Any]:
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
