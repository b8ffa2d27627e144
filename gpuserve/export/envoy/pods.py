"""Envoy in the cluster: two pods of it in front of ours, as a kustomize component."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final

from gpuserve.export.envoy import bootstrap
from gpuserve.export.envoy.listeners import LIVE_PATH, READY_PATH
from gpuserve.export.envoy.proxy import ADMIN_PORT, FOLDER, STATUS_PORT, Proxy
from gpuserve.export.manifests.components import kustomization_component
from gpuserve.export.manifests.network import (
    allowed,
    clients,
    egress_to_dns,
    monitoring,
    policy,
    service,
    service_port,
)
from gpuserve.export.manifests.pod import CONTAINER_SECURITY, TLS_FOLDER, UID, PodParts, pod_security
from gpuserve.export.manifests.workload import SURGE, budget
from gpuserve.export.manifests.yaml_text import render
from gpuserve.export.sizing.ports import HEALTH, HTTP, container_ports
from gpuserve.export.sizing.sizing import MIN_READY_S, PROPAGATION_S
from gpuserve.export.sizing.values import Reasoned

#: The version that the tests run. A kustomization's ``images`` names another.
IMAGE: Final = "envoyproxy/envoy:v1.39.3"
CONTAINER: Final = "envoy"
_REPLICAS: Final = 2
_THREADS: Final = 2
#: Envoy ends at once when it is told to.
_STOP_S: Final = 5
_STATUS: Final = "status"


def component(parts: PodParts, proxy: Proxy) -> dict[str, str]:
    """The files of the kustomize component, by name."""
    texts = bootstrap.files(proxy)
    name = f"{parts.name}-envoy-{_digest(texts)}"
    made = {
        "config.yaml": [_config(parts, name, texts)],
        "deployment.yaml": [deployment(parts, proxy, name, list(texts))],
        "service.yaml": [_service(parts, proxy)],
        "networkpolicy.yaml": _policies(parts, proxy),
        "disruptionbudget.yaml": [budget(_metadata(parts), _labels(parts), 1)],
    }
    header = f"Envoy in front of the pods: clients use the Service {parts.name}-envoy."
    files = {file: render(documents) for file, documents in made.items()}
    return {"kustomization.yaml": render([kustomization_component(resources=list(made))], header), **files}


def deployment(parts: PodParts, proxy: Proxy, config: str, files: list[str]) -> dict[str, Any]:
    """The Deployment of Envoy's pods."""
    why = "So that one may go. Nothing scales it."
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(parts),
        "spec": {
            "replicas": Reasoned(_REPLICAS, why),
            "strategy": {"type": "RollingUpdate", "rollingUpdate": SURGE},
            "minReadySeconds": MIN_READY_S,
            "selector": {"matchLabels": _labels(parts)},
            "template": {
                "metadata": {"labels": _labels(parts)},
                "spec": _pod(parts, proxy, config, files),
            },
        },
    }


def pre_stop(admin_port: int, sleep_s: int) -> list[str]:
    """The command that marks Envoy as not ready and then waits for requests under way."""
    request = (
        r"POST /healthcheck/fail HTTP/1.1\r\nHost: envoy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    script = f"exec 3<>/dev/tcp/127.0.0.1/{admin_port}; printf '{request}' >&3; cat <&3; sleep {sleep_s}"
    return ["/bin/bash", "-c", script]


def _labels(parts: PodParts) -> dict[str, str]:
    return {"app.kubernetes.io/name": "envoy", "app.kubernetes.io/instance": parts.name}


def _metadata(parts: PodParts, name: str = "") -> dict[str, Any]:
    return parts.named(name or f"{parts.name}-envoy") | {"labels": _labels(parts)}


def _digest(texts: dict[str, str]) -> str:
    joined = "".join(f"{name} {len(text)} {text}" for name, text in texts.items())
    return hashlib.sha256(joined.encode()).hexdigest()[:10]


def _config(parts: PodParts, name: str, texts: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(parts, name),
        "data": texts,
        "immutable": True,
    }


def _pod(parts: PodParts, proxy: Proxy, config: str, files: list[str]) -> dict[str, Any]:
    sleep_s = PROPAGATION_S + math.ceil(parts.settings.drain_timeout_s)
    items = [{"key": name, "path": name} for name in files]
    tls = {"name": "tls", "secret": {"secretName": parts.tls_secret, "defaultMode": 0o440}}
    why = f"preStop {sleep_s} + {_STOP_S} to end."
    own_user = Reasoned(UID, "Any user will do; this one may read the certificates.")
    return {
        "serviceAccountName": parts.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": Reasoned(sleep_s + _STOP_S, why),
        "affinity": _apart(parts),
        "securityContext": pod_security(parts) | {"runAsUser": own_user},
        "containers": [_container(parts, proxy, sleep_s)],
        "volumes": [
            {"name": "config", "configMap": {"name": config, "items": items}},
            *([tls] if parts.tls_secret else []),
        ],
    }


def _apart(parts: PodParts) -> dict[str, Any]:
    term = {"labelSelector": {"matchLabels": _labels(parts)}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _container(parts: PodParts, proxy: Proxy, sleep_s: int) -> dict[str, Any]:
    stop_why = (
        f"Not ready, and connections are told to go elsewhere: {PROPAGATION_S} s until nobody comes, "
        "then server.drain_timeout_s for the last requests. On SIGTERM Envoy ends at once."
    )
    ports = {**proxy.listen_ports, _STATUS: STATUS_PORT}
    mounts = [{"name": "config", "mountPath": FOLDER, "readOnly": True}]
    if parts.tls_secret:
        mounts.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    return {
        "name": CONTAINER,
        "image": IMAGE,
        "command": ["envoy", "-c", f"{FOLDER}/{bootstrap.FILE}"],
        "args": ["--concurrency", str(_THREADS), "--disable-hot-restart", "--log-level", "warning"],
        "ports": container_ports(ports),
        "resources": _resources(),
        **_probes(),
        "lifecycle": {"preStop": Reasoned({"exec": {"command": pre_stop(ADMIN_PORT, sleep_s)}}, stop_why)},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }


def _resources() -> dict[str, Any]:
    memory = Reasoned("2Gi", "The heap that its configuration allows, and 256 MiB beside it.")
    cpus = Reasoned(_THREADS, "One for each thread; it would start as many as the node has cores.")
    asked = Reasoned(
        "2Gi", "As the limit: it keeps requests to send them again, and is not to be evicted for it."
    )
    return {"requests": {"cpu": cpus, "memory": asked}, "limits": {"memory": memory}}


def _probes() -> dict[str, Any]:
    live = {"httpGet": {"path": LIVE_PATH, "port": _STATUS}, "timeoutSeconds": 2}
    ready = {"httpGet": {"path": READY_PATH, "port": _STATUS}, "timeoutSeconds": 1}
    first = Reasoned(
        {**live, "periodSeconds": 2, "failureThreshold": 30},
        "It waits until it has looked for the pods once.",
    )
    return {
        "startupProbe": first,
        "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 3},
    }


def _service(parts: PodParts, proxy: Proxy) -> dict[str, Any]:
    numbers = dict(proxy.listen_ports)
    if HTTP in numbers:
        numbers[HTTP] = 443 if HTTP in parts.ports.tls else 80
    ports = [service_port(parts, name, port) for name, port in numbers.items()]
    return service(_metadata(parts), _labels(parts), ports)


def _policies(parts: PodParts, proxy: Proxy) -> list[dict[str, Any]]:
    """Clients to Envoy, and Envoy to the pods; their port for health is open to nobody else but the node."""
    asked = [allowed(port) for port in proxy.listen_ports.values()]
    to_pods = [
        allowed(port) for name, port in parts.ports.numbers.items() if name in (*proxy.clusters, HEALTH)
    ]
    rules = {
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": clients(), "ports": asked},
            {"from": monitoring(), "ports": [allowed(STATUS_PORT)]},
        ],
        "egress": [
            {"to": [{"podSelector": {"matchLabels": parts.labels}}], "ports": to_pods},
            egress_to_dns(),
        ],
    }
    made = [policy(_metadata(parts), _labels(parts), rules)]
    if HEALTH in parts.ports.numbers:
        envoy = [{"podSelector": {"matchLabels": _labels(parts)}}]
        rules = {
            "policyTypes": ["Ingress"],
            "ingress": [{"from": envoy, "ports": [allowed(parts.ports.numbers[HEALTH])]}],
        }
        made.append(policy(_metadata(parts, f"{parts.name}-envoy-health"), parts.labels, rules))
    return made
