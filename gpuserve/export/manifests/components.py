"""What changes the base, each as a kustomize component: surge, writable root, daemonset, keda, monitoring.

Components go together with each other and with an overlay of a user's own, which overlays do not.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.manifests.alerts import rules, scrape_selector
from gpuserve.export.manifests.dashboard import dashboard_text
from gpuserve.export.manifests.metric_names import SATURATION
from gpuserve.export.manifests.network import METRICS_LABEL
from gpuserve.export.manifests.pod import PodParts
from gpuserve.export.manifests.scaling import SATURATION_TARGET
from gpuserve.export.manifests.workload import SURGE, behavior
from gpuserve.export.manifests.yaml_text import render
from gpuserve.export.sizing.ports import METRICS
from gpuserve.export.sizing.values import Reasoned

_KUSTOMIZATION: Final = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_COMPONENT: Final = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
_SCRAPE_S: Final = 15
#: Where Prometheus looks for monitors and rules of its own accord, in the charts that most clusters have.
_RELEASE = {"release": "prometheus"}


def kustomization(resources: list[str]) -> dict[str, Any]:
    """A kustomization of these files."""
    return {**_KUSTOMIZATION, "resources": resources}


def kustomization_component(
    *, resources: list[str] | None = None, patches: list[Any] | None = None
) -> dict[str, Any]:
    """A kustomize component: a change that goes together with others."""
    made: dict[str, Any] = dict(_COMPONENT)
    if resources:
        made["resources"] = resources
    if patches:
        made["patches"] = patches
    return made


def kustomization_overlay(name: str) -> dict[str, Any]:
    """The base with one component."""
    return {**_KUSTOMIZATION, "resources": ["../../base"], "components": [f"../../components/{name}"]}


def components(parts: PodParts, models: list[str]) -> dict[str, dict[str, str]]:
    """The files of every component, by component and file name."""
    made = {"daemonset": daemonset(parts), "keda": keda(parts, models), "monitoring": monitoring(parts)}
    return {"surge": surge(parts), "writable-root": writable_root(parts), **made} if parts.on_gpu else made


def surge(parts: PodParts) -> dict[str, str]:
    """The component for a cluster with a spare GPU node: a new pod serves before an old one leaves."""
    patch = [{"op": "replace", "path": "/spec/strategy/rollingUpdate", "value": SURGE}]
    patches = [_patch(parts, "Deployment", patch)]
    header = "Needs one GPU node more than there are pods: a new pod serves before an old one leaves."
    return {"kustomization.yaml": render([kustomization_component(patches=patches)], header)}


def writable_root(parts: PodParts) -> dict[str, str]:
    """The component for nodes whose container toolkit writes into the root of a container."""
    path = "/spec/template/spec/containers/0/securityContext/readOnlyRootFilesystem"
    patches = [_patch(parts, "Deployment", [{"op": "replace", "path": path, "value": False}])]
    header = "For nodes that bring GPUs in by a hook that writes into the root of the container."
    return {"kustomization.yaml": render([kustomization_component(patches=patches)], header)}


def daemonset(parts: PodParts) -> dict[str, str]:
    """The component that runs one pod on every node that can have one."""
    gone = ("strategy", "progressDeadlineSeconds")
    patch: list[dict[str, Any]] = [
        {"op": "replace", "path": "/kind", "value": "DaemonSet"},
        {"op": "add", "path": "/spec/updateStrategy", "value": {"type": "RollingUpdate"}},
        *({"op": "remove", "path": f"/spec/{key}"} for key in gone),
        {"op": "remove", "path": "/spec/template/spec/topologySpreadConstraints"},
    ]
    patches = [
        {**_patch(parts, "Deployment", patch), "options": {"allowKindChange": True}},
        _without(parts, "autoscaling/v2", "HorizontalPodAutoscaler"),
        _without(parts, "policy/v1", "PodDisruptionBudget"),
    ]
    header = (
        "One pod on every node (of those with a GPU, where the models need one). There is nothing to scale, "
        "and a disruption budget does not count pods of a DaemonSet."
    )
    return {"kustomization.yaml": render([kustomization_component(patches=patches)], header)}


def keda(parts: PodParts, models: list[str]) -> dict[str, str]:
    """The component with KEDA as the autoscaler, which asks Prometheus without an adapter."""
    patches = [_without(parts, "autoscaling/v2", "HorizontalPodAutoscaler")]
    header = "KEDA asks Prometheus itself and makes an autoscaler of its own; one Deployment has only one."
    component = kustomization_component(resources=["scaledobject.yaml"], patches=patches)
    return {
        "kustomization.yaml": render([component], header),
        "scaledobject.yaml": render([scaled_object(parts, models)]),
    }


def scaled_object(parts: PodParts, models: list[str]) -> dict[str, Any]:
    """KEDA's object: the saturation summed over the pods, for each model."""
    most = parts.options.most_replicas
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": parts.metadata(),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": parts.name},
            "pollingInterval": Reasoned(_SCRAPE_S, "As often as Prometheus has something new."),
            "minReplicaCount": Reasoned(parts.options.replicas, "--replicas."),
            "maxReplicaCount": Reasoned(most, "--max-replicas."),
            "fallback": Reasoned(
                {"failureThreshold": 3, "replicas": most},
                "Without Prometheus nobody knows the load: as many as there may be, after three questions.",
            ),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior()}},
            "triggers": [_trigger(parts, model) for model in models],
        },
    }


def saturation_query(selector: str, model: str) -> str:
    """The saturation of a model, of all pods together; of several versions that with the most."""
    return f'sum(max by (pod) ({SATURATION}{{{selector},model="{model}"}}))'


def _trigger(parts: PodParts, model: str) -> dict[str, Any]:
    selector = scrape_selector(parts.name, parts.options.namespace)
    metadata = {
        "serverAddress": parts.options.prometheus,
        "query": saturation_query(selector, model),
        "threshold": Reasoned(
            f"{SATURATION_TARGET:g}", "For each pod; at 1 every instance is fully busy and nothing waits."
        ),
    }
    return {"type": "prometheus", "metricType": "AverageValue", "metadata": metadata}


def monitoring(parts: PodParts) -> dict[str, str]:
    """The component with what the Prometheus operator and Grafana's sidecar look for."""
    files = ["servicemonitor.yaml", "prometheusrule.yaml", "dashboard.yaml"]
    return {
        "kustomization.yaml": render([kustomization_component(resources=files)]),
        "servicemonitor.yaml": render([service_monitor(parts)]),
        "prometheusrule.yaml": render([prometheus_rule(parts)]),
        "dashboard.yaml": render([dashboard_object(parts)]),
    }


def service_monitor(parts: PodParts) -> dict[str, Any]:
    """The ServiceMonitor, by which Prometheus finds the metrics page of every pod."""
    own = Reasoned(True, "Our label instance is a worker (cpu#0); the pod is in the label pod.")
    endpoint: dict[str, Any] = {
        "port": METRICS,
        "path": "/metrics",
        "interval": Reasoned(f"{_SCRAPE_S}s", "As often as the autoscaler decides."),
        "scrapeTimeout": Reasoned("5s", "A pod that is asked for longer is no reading."),
        "honorLabels": own,
    }
    if METRICS in parts.ports.tls:
        endpoint |= {"scheme": "https", "tlsConfig": _scrape_tls(parts)}
    metadata = parts.metadata() | {"labels": {**parts.labels, **_RELEASE}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata,
        "spec": {"selector": {"matchLabels": {**parts.labels, **METRICS_LABEL}}, "endpoints": [endpoint]},
    }


def _scrape_tls(parts: PodParts) -> dict[str, Any]:
    """How Prometheus speaks TLS to the pods; where they ask for a certificate, it shows theirs."""

    def of_secret(key: str) -> dict[str, str]:
        return {"name": parts.tls_secret, "key": key}

    config: dict[str, Any] = {"ca": {"secret": of_secret("ca.crt")}, "serverName": parts.name}
    if parts.settings.tls_client_ca:
        config |= {"cert": {"secret": of_secret("tls.crt")}, "keySecret": of_secret("tls.key")}
    return config


def prometheus_rule(parts: PodParts) -> dict[str, Any]:
    """The PrometheusRule of these pods."""
    metadata = parts.metadata() | {"labels": {**parts.labels, **_RELEASE}}
    selector = scrape_selector(parts.name, parts.options.namespace)
    arena = parts.settings.max_arena_nbytes
    return rules(metadata, selector, parts.name, max_arena_nbytes=arena, on_gpu=parts.on_gpu)


def dashboard_object(parts: PodParts) -> dict[str, Any]:
    """The ConfigMap with the dashboard, which Grafana's sidecar finds by a label."""
    metadata = parts.metadata("-dashboard") | {"labels": {**parts.labels, "grafana_dashboard": "1"}}
    text = dashboard_text(parts.name, on_gpu=parts.on_gpu)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {f"{parts.name}.json": text},
    }


def _patch(parts: PodParts, kind: str, operations: list[dict[str, Any]]) -> dict[str, Any]:
    return {"target": {"kind": kind, "name": parts.name}, "patch": render([operations])}


def _without(parts: PodParts, version: str, kind: str) -> dict[str, Any]:
    """A patch that removes an object."""
    gone = {"apiVersion": version, "kind": kind, "metadata": {"name": parts.name}, "$patch": "delete"}
    return {"target": {"kind": kind, "name": parts.name}, "patch": render([gone])}
