"""Envoy's configuration as a whole, and the files that it is written into."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.envoy import listeners, tls
from gpuserve.export.envoy.clusters import cluster
from gpuserve.export.envoy.proxy import HEAP_NBYTES, Proxy
from gpuserve.export.manifests.yaml_text import render
from gpuserve.export.sizing.values import Reasoned, readable

FILE: Final = "envoy.yaml"
_TRIGGER: Final = "envoy.resource_monitors.fixed_heap"
_HEAP: Final = "type.googleapis.com/envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig"


def files(proxy: Proxy) -> dict[str, str]:
    """Texts by file name: the bootstrap, and with TLS the files that name certificates."""
    header = (
        f"Envoy in front of {proxy.name}: balances requests, and repeats those that a dying pod has lost."
    )
    made = {FILE: render([bootstrap(proxy)], header)}
    secrets = tls.secrets(proxy) if proxy.ports.tls else {}
    return made | {name: render([document]) for name, document in secrets.items()}


def bootstrap(proxy: Proxy) -> dict[str, Any]:
    """The configuration that ``envoy -c`` reads."""
    listening = [listeners.listener(proxy, name) for name in proxy.clusters]
    clusters = [cluster(proxy, name) for name in proxy.clusters]
    made: dict[str, Any] = {"node": {"id": proxy.name, "cluster": proxy.name}}
    if proxy.status_port is not None:
        listening.append(listeners.status_listener(proxy, proxy.status_port))
    if proxy.admin_port is not None:
        made["admin"] = Reasoned(listeners.admin(proxy.admin_port), "Only for this pod: it can end Envoy.")
        clusters.append(listeners.admin_cluster(proxy.admin_port))
    made["static_resources"] = {"listeners": listening, "clusters": clusters}
    return made | {"overload_manager": _overload()}


def _overload() -> dict[str, Any]:
    monitor = {"@type": _HEAP, "max_heap_size_bytes": HEAP_NBYTES}
    why = (
        f"{readable(HEAP_NBYTES)}: a little less than the memory of the container. Near it new requests are "
        "refused (503), before the kernel ends all of them."
    )
    actions = {"shrink_heap": 0.9, "stop_accepting_requests": 0.95}
    return {
        "refresh_interval": "0.25s",
        "resource_monitors": [{"name": _TRIGGER, "typed_config": Reasoned(monitor, why)}],
        "actions": [
            {
                "name": f"envoy.overload_actions.{name}",
                "triggers": [{"name": _TRIGGER, "threshold": {"value": share}}],
            }
            for name, share in actions.items()
        ],
    }
