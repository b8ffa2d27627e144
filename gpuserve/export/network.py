"""How pods are reached: Services, and who may use them."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.pod import Parts
from gpuserve.export.ports import GRPC, HTTP, METRICS
from gpuserve.export.reasoned import Reasoned

#: On a namespace: its pods may send requests.
CLIENT_LABEL: Final = "gpuserve-client"
_MONITORING: Final = "monitoring"
#: By which the metrics Service is told from the others.
METRICS_LABEL: Final = {"app.kubernetes.io/component": METRICS}
_DNS: Final = 53


def services(parts: Parts) -> list[dict[str, Any]]:
    """One for each port that there is."""
    made = []
    if GRPC in parts.ports.numbers:
        made.append(_grpc(parts))
    if HTTP in parts.ports.numbers:
        made.append(_http(parts))
    return [*made, _metrics(parts)]


def _service(
    metadata: dict[str, Any], parts: Parts, ports: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    spec = {**more, "selector": parts.labels, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _port(parts: Parts, name: str, number: int) -> dict[str, Any]:
    return {
        "name": name,
        "port": number,
        "targetPort": name,
        "protocol": "TCP",
        "appProtocol": parts.ports.app_protocol(name),
    }


def _grpc(parts: Parts) -> dict[str, Any]:
    why = (
        "One address a pod: a gRPC client keeps its connection, so it balances itself (dns:///, round_robin)."
    )
    ports = [_port(parts, GRPC, parts.ports.numbers[GRPC])]
    return _service(parts.metadata("-grpc"), parts, ports, clusterIP=Reasoned("None", why))


def _http(parts: Parts) -> dict[str, Any]:
    ports = [_port(parts, HTTP, 443 if HTTP in parts.ports.tls else 80)]
    if GRPC in parts.ports.numbers:
        gateway = _port(parts, GRPC, parts.ports.numbers[GRPC])
        ports.append(
            {**gateway, "name": Reasoned(GRPC, "For a gateway that balances requests, as Envoy does.")}
        )
    return _service(parts.metadata(), parts, ports)


def _metrics(parts: Parts) -> dict[str, Any]:
    metadata = parts.metadata("-metrics") | {"labels": {**parts.labels, **METRICS_LABEL}}
    ports = [_port(parts, METRICS, parts.ports.numbers[METRICS])]
    return _service(metadata, parts, ports, clusterIP="None")


def network_policy(parts: Parts) -> dict[str, Any]:
    """Requests from this namespace and from labelled ones, metrics from monitoring, and out only to DNS."""
    asked = [allowed(number) for name, number in parts.ports.numbers.items() if name in (GRPC, HTTP)]
    why = "A model that asks others, or a collector of traces, needs a rule of its own here."
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": parts.metadata(),
        "spec": {
            "podSelector": {"matchLabels": parts.labels},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": clients(), "ports": asked},
                {"from": monitoring(), "ports": [allowed(parts.ports.numbers[METRICS])]},
            ],
            "egress": Reasoned([egress_to_dns()], why),
        },
    }


def clients() -> list[dict[str, Any]]:
    """Who may send requests."""
    return [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}]


def monitoring() -> list[dict[str, Any]]:
    """Who may read metrics."""
    return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": _MONITORING}}}]


def egress_to_dns() -> dict[str, Any]:
    """The way to the cluster's DNS."""
    return {
        "to": [{
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        }],
        "ports": [{"port": _DNS, "protocol": "UDP"}, allowed(_DNS)],
    }  # fmt: skip


def allowed(port: int) -> dict[str, Any]:
    """A port of a rule."""
    return {"port": port, "protocol": "TCP"}
