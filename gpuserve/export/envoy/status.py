"""A port of Envoy for the node and for Prometheus. The admin interface can end Envoy: nobody else has it."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.envoy.listeners import manager, router, socket_address
from gpuserve.export.envoy.proxy import Proxy

ADMIN: Final = "admin"
READY_PATH: Final = "/ready"
LIVE_PATH: Final = "/live"
METRICS_PATH: Final = "/metrics"
_LOOPBACK: Final = "127.0.0.1"


def admin(port: int) -> dict[str, Any]:
    """The interface itself, which this machine alone can reach."""
    return {"address": socket_address(_LOOPBACK, port)}


def admin_cluster(port: int) -> dict[str, Any]:
    """The same as a cluster: for the metrics."""
    at = {"endpoint": {"address": socket_address(_LOOPBACK, port)}}
    load = {"cluster_name": ADMIN, "endpoints": [{"lb_endpoints": [at]}]}
    return {"name": ADMIN, "type": "STATIC", "connect_timeout": "1s", "load_assignment": load}


def listener(proxy: Proxy, port: int) -> dict[str, Any]:
    """``/ready``: not from ``/healthcheck/fail`` on; ``/metrics`` where there is an admin interface."""
    live = {"match": {"path": LIVE_PATH}, "direct_response": {"status": 200}}
    routes = [live] if proxy.admin_port is None else [live, _metrics()]
    config = {
        "codec_type": "AUTO",
        "route_config": {"virtual_hosts": [{"name": "status", "domains": ["*"], "routes": routes}]},
        "http_filters": [_ready(), router()],
    }
    filters = [manager("status", config)]
    return {
        "name": "status",
        "address": socket_address(proxy.address, port),
        "filter_chains": [{"filters": filters}],
    }


def _metrics() -> dict[str, Any]:
    route = {"cluster": ADMIN, "prefix_rewrite": "/stats/prometheus"}
    return {"match": {"path": METRICS_PATH}, "route": route}


def _ready() -> dict[str, Any]:
    health_check = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.health_check.v3.HealthCheck",
        "pass_through_mode": False,
        "headers": [{"name": ":path", "string_match": {"exact": READY_PATH}}],
    }
    return {"name": "envoy.filters.http.health_check", "typed_config": health_check}
