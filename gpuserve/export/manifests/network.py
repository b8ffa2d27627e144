"""How pods are reached: Services, and who may use them."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.manifests.pod import PodParts
from gpuserve.export.sizing.ports import GRPC, HTTP, METRICS
from gpuserve.export.sizing.values import Reasoned

#: On a namespace: its pods may send requests.
CLIENT_LABEL: Final = "gpuserve-client"
_MONITORING: Final = "monitoring"
#: By which the metrics Service is told from the others.
METRICS_LABEL: Final = {"app.kubernetes.io/component": METRICS}
_DNS: Final = 53


def services(parts: PodParts) -> list[dict[str, Any]]:
    """The Services, one for each port that there is."""
    made = []
    if GRPC in parts.ports.numbers:
        made.append(_grpc(parts))
    if HTTP in parts.ports.numbers:
        made.append(_http(parts))
    return [*made, _metrics(parts)]


def service(
    metadata: dict[str, Any], labels: dict[str, str], ports: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A Service in front of the pods with these labels."""
    spec = {**more, "selector": labels, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def service_port(parts: PodParts, name: str, number: int) -> dict[str, Any]:
    """A port of a Service, in front of the pods' port of this name."""
    return {
        "name": name,
        "port": number,
        "targetPort": name,
        "protocol": "TCP",
        "appProtocol": parts.ports.app_protocol(name),
    }


def _grpc(parts: PodParts) -> dict[str, Any]:
    why = (
        "One address a pod: a gRPC client keeps its connection, so it balances itself (dns:///, round_robin)."
    )
    ports = [service_port(parts, GRPC, parts.ports.numbers[GRPC])]
    return service(parts.metadata("-grpc"), parts.labels, ports, clusterIP=Reasoned("None", why))


def _http(parts: PodParts) -> dict[str, Any]:
    ports = [service_port(parts, HTTP, 443 if HTTP in parts.ports.tls else 80)]
    if GRPC in parts.ports.numbers:
        gateway = service_port(parts, GRPC, parts.ports.numbers[GRPC])
        ports.append(
            {**gateway, "name": Reasoned(GRPC, "For a gateway that balances requests, as Envoy does.")}
        )
    return service(parts.metadata(), parts.labels, ports)


def _metrics(parts: PodParts) -> dict[str, Any]:
    metadata = parts.metadata("-metrics") | {"labels": {**parts.labels, **METRICS_LABEL}}
    ports = [service_port(parts, METRICS, parts.ports.numbers[METRICS])]
    return service(metadata, parts.labels, ports, clusterIP="None")


def network_policy(parts: PodParts) -> dict[str, Any]:
    """The NetworkPolicy: requests from here and labelled namespaces, metrics from monitoring, DNS out."""
    asked = [allowed(number) for name, number in parts.ports.numbers.items() if name in (GRPC, HTTP)]
    why = "A model that asks others, or a collector of traces, needs a rule of its own here."
    rules = {
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": clients(), "ports": asked},
            {"from": monitoring(), "ports": [allowed(parts.ports.numbers[METRICS])]},
        ],
        "egress": Reasoned([egress_to_dns()], why),
    }
    return policy(parts.metadata(), parts.labels, rules)


def policy(metadata: dict[str, Any], labels: dict[str, str], rules: dict[str, Any]) -> dict[str, Any]:
    """A NetworkPolicy for the pods with these labels."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {"podSelector": {"matchLabels": labels}, **rules},
    }


def clients() -> list[dict[str, Any]]:
    """The peers of a rule that may send requests."""
    return [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}]


def monitoring() -> list[dict[str, Any]]:
    """The peers of a rule that may read metrics."""
    return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": _MONITORING}}}]


def egress_to_dns() -> dict[str, Any]:
    """The rule that lets pods ask the cluster's DNS."""
    return {
        "to": [{
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        }],
        "ports": [{"port": _DNS, "protocol": "UDP"}, allowed(_DNS)],
    }  # fmt: skip


def allowed(port: int) -> dict[str, Any]:
    """A TCP port as a rule lists it."""
    return {"port": port, "protocol": "TCP"}
