"""What runs the pods: Deployment, ServiceAccount, disruption budget and autoscaler."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.manifests import scaling
from gpuserve.export.manifests.metric_names import SATURATION
from gpuserve.export.manifests.pod import PodParts, pod_spec
from gpuserve.export.sizing.sizing import MIN_READY_S
from gpuserve.export.sizing.values import Reasoned

NO_SPARE_NODE: Final = {"maxSurge": 0, "maxUnavailable": 1}
SURGE: Final = {"maxSurge": 1, "maxUnavailable": 0}
_NO_SPARE_WHY: Final = (
    "No GPU node is spare: an old pod leaves before a new one has its GPUs (overlay surge: after)."
)
_SURGE_WHY: Final = "A new pod serves before an old one leaves."


def service_account(parts: PodParts) -> dict[str, Any]:
    """The ServiceAccount, which may do nothing: the server asks the cluster for nothing."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": parts.metadata(),
        "automountServiceAccountToken": False,
    }


def deployment(parts: PodParts) -> dict[str, Any]:
    """The Deployment. The number of pods is left to the autoscaler, or an update would set it back."""
    rolling = Reasoned(NO_SPARE_NODE, _NO_SPARE_WHY) if parts.on_gpu else Reasoned(SURGE, _SURGE_WHY)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": parts.metadata(),
        "spec": {
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
            "minReadySeconds": Reasoned(MIN_READY_S, "A pod that fails at once stops the rollout."),
            "progressDeadlineSeconds": parts.sizes.progress_s,
            "selector": {"matchLabels": parts.labels},
            "template": {"metadata": {"labels": parts.labels}, "spec": pod_spec(parts)},
        },
    }


def disruption_budget(parts: PodParts) -> dict[str, Any]:
    """The PodDisruptionBudget: one pod at a time leaves a drained node, a broken one at once."""
    most = Reasoned(1, "The others take over what one pod leaves, not what two leave.")
    return budget(parts.metadata(), parts.labels, most)


def budget(metadata: dict[str, Any], labels: dict[str, str], most: int | Reasoned) -> dict[str, Any]:
    """A PodDisruptionBudget by which at most this number of pods leaves at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {
            "maxUnavailable": most,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels},
        },
    }


def autoscaler(parts: PodParts, models: list[str]) -> dict[str, Any]:
    """The HorizontalPodAutoscaler: the model whose saturation needs the most pods decides."""
    target = Reasoned(
        f"{round(scaling.SATURATION_TARGET * 1000)}m",
        "The mean of the pods: at 1 every instance is fully busy and nothing waits.",
    )
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": parts.metadata(),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": parts.name},
            "minReplicas": Reasoned(
                parts.options.replicas, "--replicas: the Deployment itself says no number."
            ),
            "maxReplicas": Reasoned(parts.options.most_replicas, "--max-replicas."),
            "metrics": [_metric(model, target) for model in models],
            "behavior": behavior(),
        },
    }


def behavior() -> dict[str, Any]:
    """How fast an autoscaler may change the number of pods."""
    double = {"type": "Percent", "value": scaling.UP_PERCENT, "periodSeconds": scaling.UP_PERIOD_S}
    tenth = {"type": "Percent", "value": scaling.DOWN_PERCENT, "periodSeconds": scaling.DOWN_PERIOD_S}
    steady = "By a simulation of days and bursts: a shorter window refuses more requests of bursts."
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": Reasoned(
                scaling.UP_WINDOW_S, "At once: what does not fit is refused until a pod is there."
            ),
            "policies": [Reasoned(double, "Twice as many in a minute, in which a pod starts.")],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": Reasoned(scaling.DOWN_WINDOW_S, steady),
            "policies": [Reasoned(tenth, "A tenth of the pods in a minute, at least one.")],
        },
    }


def _metric(model: str, target: Reasoned) -> dict[str, Any]:
    metric = {"name": SATURATION, "selector": {"matchLabels": {"model": model}}}
    return {
        "type": "Pods",
        "pods": {"metric": metric, "target": {"type": "AverageValue", "averageValue": target}},
    }
