"""The pods as Envoy sees them: one cluster for each of their ports that takes requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.envoy.tls import upstream
from gpuserve.export.sizing.ports import HEALTH
from gpuserve.export.sizing.values import MIB, Reasoned

_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_ASSIGNMENT: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
_NO_LIMIT: Final = 4294967295
#: On an endpoint: which transport its health checks use.
_HEALTH_MATCH: Final = {"health": True}


def cluster(proxy: Proxy, name: str) -> dict[str, Any]:
    """The cluster for the pods' port of this name."""
    return {
        "name": name,
        **_members(proxy, name),
        "connect_timeout": Reasoned("1s", "A pod answers at once, and a repeat goes to another one."),
        "lb_policy": Reasoned("LEAST_REQUEST", "Requests differ in what they take, and so do batches."),
        "common_lb_config": {
            "healthy_panic_threshold": Reasoned(
                {"value": 1},
                "To pods that are not ready only where none is: with few ready ones the others are leaving.",
            )
        },
        "per_connection_buffer_limit_bytes": 1 * MIB,
        "typed_extension_protocol_options": {_HTTP_OPTIONS: _http2()},
        "circuit_breakers": _thresholds(),
        "health_checks": [_health_check(proxy)],
        "outlier_detection": _ejection(),
        **_transport(proxy, name),
    }


def endpoints(proxy: Proxy, name: str, addresses: Iterable[str], version: str) -> dict[str, Any]:
    """What ``CLUSTER.yaml`` in ``endpoints_folder`` holds; Envoy reads it when it is moved there."""
    return {"version_info": version, "resources": [{"@type": _ASSIGNMENT, **_pods(proxy, name, addresses)}]}


def _members(proxy: Proxy, name: str) -> dict[str, Any]:
    if proxy.endpoints_folder:
        source = {
            "path_config_source": {
                "path": f"{proxy.endpoints_folder}/{name}.yaml",
                "watched_directory": {"path": proxy.endpoints_folder},
            }
        }
        return {"type": "EDS", "eds_cluster_config": {"eds_config": source}}
    why = (
        "Asked for every 5 s, as long as the cluster's DNS keeps a name. A pod that is not in it any more is "
        "used until it is not ready either."
    )
    return {
        "type": Reasoned("STRICT_DNS", why),
        "dns_lookup_family": "V4_PREFERRED",
        "load_assignment": _pods(proxy, name, [proxy.host]),
    }


def _pods(proxy: Proxy, name: str, addresses: Iterable[str]) -> dict[str, Any]:
    return {
        "cluster_name": name,
        "endpoints": [{"lb_endpoints": [_endpoint(proxy, name, one) for one in addresses]}],
    }


def _endpoint(proxy: Proxy, name: str, address: str) -> dict[str, Any]:
    at = {"socket_address": {"address": address, "port_value": proxy.ports.numbers[name]}}
    endpoint: dict[str, Any] = {"address": at}
    if HEALTH in proxy.ports.numbers:
        endpoint["health_check_config"] = {"port_value": proxy.ports.numbers[HEALTH]}
    return {"endpoint": endpoint}


def _http2() -> dict[str, Any]:
    keepalive = Reasoned(
        {"interval": "10s", "timeout": "20s"},
        "A node that is gone closes no connection: without an answer to a PING for so long, requests that "
        "wait there are repeated elsewhere.",
    )
    http2 = {
        "max_concurrent_streams": Reasoned(256, "With more, there are more connections."),
        "initial_stream_window_size": 16 * MIB,
        "initial_connection_window_size": 64 * MIB,
        "connection_keepalive": keepalive,
    }
    why = (
        "HTTP/2 also for HTTP: a pod says GOAWAY before it leaves, so no request is sent into a connection "
        "that is about to close."
    )
    return {
        "@type": f"type.googleapis.com/{_HTTP_OPTIONS}",
        "explicit_http_config": Reasoned({"http2_protocol_options": http2}, why),
    }


def _thresholds() -> dict[str, Any]:
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), _NO_LIMIT)
    budget = {"budget_percent": {"value": 100}, "min_retry_concurrency": 1000}
    why = (
        "When a pod of two dies, half of all requests are repeated at once; Envoy's own limit is 3. In an "
        "overload a request may come four times: full queues refuse it at once."
    )
    threshold = {**limits, "retry_budget": Reasoned(budget, why)}
    return {"thresholds": [Reasoned(threshold, "Nothing is refused here: the pods' queues have limits.")]}


def _health_check(proxy: Proxy) -> Reasoned:
    asked: dict[str, Any] = {"service_name": "readiness"}
    if proxy.health_token is not None:
        header = {"key": "authorization", "value": f"Bearer {proxy.health_token}"}
        asked["initial_metadata"] = [
            {"header": Reasoned(header, "Health is restricted: keep this file as you keep the token.")}
        ]
    why = (
        "Not ready counts at once, as from SIGTERM on; no answer counts after 3. A pod is back with one good "
        "answer. Requests that it has are left to it."
    )
    check = {
        "timeout": Reasoned("2s", "A front with much to do answers late; it is not gone."),
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 3,
        "healthy_threshold": 1,
        "grpc_health_check": asked,
    }
    if HEALTH in proxy.ports.numbers and proxy.ports.tls:
        check["transport_socket_match_criteria"] = dict(_HEALTH_MATCH)
    return Reasoned(check, why)


def _ejection() -> dict[str, Any]:
    why = (
        "Only by connections that fail or break, before a health check finds it. Answers say nothing of a "
        "pod: 500 may be a bad request to a model, 503 a full queue, 504 a short deadline."
    )
    return {
        "split_external_local_origin_errors": Reasoned(True, why),
        "consecutive_local_origin_failure": 3,
        "enforcing_consecutive_local_origin_failure": 100,
        "enforcing_local_origin_success_rate": 0,
        "enforcing_consecutive_5xx": 0,
        "enforcing_consecutive_gateway_failure": 0,
        "enforcing_success_rate": 0,
        "interval": "1s",
        "base_ejection_time": Reasoned("5s", "A good health check ends it earlier."),
        "max_ejection_percent": 50,
    }


def _transport(proxy: Proxy, name: str) -> dict[str, Any]:
    """TLS where the port speaks it; the port for health never does."""
    if name not in proxy.ports.tls:
        return {}
    socket = upstream(proxy)
    if HEALTH not in proxy.ports.numbers:
        return {"transport_socket": socket}
    plain = {
        "name": "envoy.transport_sockets.raw_buffer",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"
        },
    }
    return {
        "transport_socket_matches": [
            {"name": "health", "match": dict(_HEALTH_MATCH), "transport_socket": plain},
            {"name": "requests", "match": {}, "transport_socket": socket},
        ]
    }
