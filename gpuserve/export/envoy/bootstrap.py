"""Envoy's configuration as a whole, and the files that it is written into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final

from gpuserve.export.envoy.proxy import HEAP_NBYTES, Proxy
from gpuserve.export.manifests.pod import CONNECTION_AGE_S
from gpuserve.export.manifests.yaml_text import render
from gpuserve.export.sizing.ports import HEALTH, HTTP
from gpuserve.export.sizing.values import readable
from gpuserve.export.templates.filling import filled

FILE: Final = "envoy.yaml"
_ASSIGNMENT: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def files(proxy: Proxy) -> dict[str, str]:
    """Texts by file name: what ``envoy -c`` reads, and with TLS the files that name certificates."""
    places = _places(proxy)
    names = (FILE, "certificate.yaml", "authority.yaml") if proxy.ports.tls else (FILE,)
    return {name: render(filled(f"envoy/{name}", places)) for name in names}


def endpoints(proxy: Proxy, name: str, addresses: Iterable[str], version: str) -> dict[str, Any]:
    """What ``CLUSTER.yaml`` in ``endpoints_folder`` holds; Envoy reads it when it is moved there."""
    resource = {"@type": _ASSIGNMENT, **_load_assignment(proxy, name, addresses)}
    return {"version_info": version, "resources": [resource]}


def _places(proxy: Proxy) -> dict[str, Any]:
    health_port = proxy.ports.numbers.get(HEALTH)
    clusters = [
        {
            "cluster": name,
            "listen_port": port,
            "tls": name in proxy.ports.tls,
            "is_http": name == HTTP,
            "load_assignment": _load_assignment(proxy, name, [proxy.host]),
        }
        for name, port in proxy.listen_ports.items()
    ]
    return {
        **{one.name: getattr(proxy, one.name) for one in fields(proxy)},
        "clusters": clusters,
        "takes_ipv6": proxy.address == "::",
        "health_port": health_port,
        "has_plain_health_port": health_port is not None and bool(proxy.ports.tls),
        "connection_age_s": CONNECTION_AGE_S,
        "heap_nbytes": HEAP_NBYTES,
        "heap_size": readable(HEAP_NBYTES),
    }


def _load_assignment(proxy: Proxy, name: str, addresses: Iterable[str]) -> dict[str, Any]:
    places = {
        "cluster": name,
        "pod_port": proxy.ports.numbers[name],
        "health_port": proxy.ports.numbers.get(HEALTH),
        "addresses": [{"address": address} for address in addresses],
    }
    (made,) = filled("envoy/load_assignment.yaml", places)
    assignment: dict[str, Any] = made
    return assignment
