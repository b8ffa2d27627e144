"""The ports of Envoy: those that clients use with their routes, and one for the node and for Prometheus.

Routes say which requests Envoy repeats, and when. They have no time limits: those are the client's and the
server's. The admin interface can end Envoy: nobody outside its pod has it.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.envoy.tls import downstream
from gpuserve.export.manifests.pod import CONNECTION_AGE_S
from gpuserve.export.sizing.ports import HTTP
from gpuserve.export.sizing.values import MIB, Reasoned

_MANAGER: Final = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER: Final = {
    "name": "envoy.filters.http.router",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
        "suppress_envoy_headers": True,
    },
}


def listener(proxy: Proxy, name: str) -> dict[str, Any]:
    """The listener in front of the pods' port of this name."""
    tls = {"transport_socket": downstream(proxy)} if name in proxy.ports.tls else {}
    return {
        "name": name,
        "address": socket_address(proxy.address, proxy.listen_ports[name]),
        "per_connection_buffer_limit_bytes": 1 * MIB,
        "filter_chains": [{"filters": [manager(name, _requests(proxy, name))], **tls}],
    }


def socket_address(address: str, port: int) -> dict[str, Any]:
    """An address to listen on; IPv6 takes IPv4 as well."""
    both = {"ipv4_compat": True} if address == "::" else {}
    return {"socket_address": {"address": address, "port_value": port, **both}}


def manager(name: str, more: dict[str, Any]) -> dict[str, Any]:
    """A filter that speaks HTTP, with these further settings."""
    typed = {"@type": f"type.googleapis.com/{_MANAGER}", "stat_prefix": name, **more}
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": typed}


def _requests(proxy: Proxy, name: str) -> dict[str, Any]:
    made = {
        "codec_type": "AUTO",
        "server_header_transformation": "PASS_THROUGH",
        "generate_request_id": False,
        "use_remote_address": True,
        "max_request_headers_kb": Reasoned(64, "As the pods take them."),
        "request_headers_timeout": Reasoned("10s", "Headers come in one piece; bodies may take their time."),
        "stream_idle_timeout": Reasoned("0s", "A stream, or a slow model, may be silent for long."),
        "common_http_protocol_options": _connections(),
        "http1_safe_max_connection_duration": True,
        "http2_protocol_options": _http2(),
        "route_config": route_config(proxy, name),
        "http_filters": [_ROUTER],
    }
    return made | ({"local_reply_config": _local_reply()} if name == HTTP else {})


def _connections() -> dict[str, Any]:
    age = Reasoned(f"{CONNECTION_AGE_S}s", "Clients that connect anew find an Envoy that was not there.")
    return {"idle_timeout": "3600s", "max_connection_duration": age}


def _http2() -> dict[str, Any]:
    gone = Reasoned({"interval": "30s", "timeout": "20s"}, "Clients that have vanished.")
    return {
        "max_concurrent_streams": 1024,
        "initial_stream_window_size": 16 * MIB,
        "initial_connection_window_size": 64 * MIB,
        "connection_keepalive": gone,
    }


def _local_reply() -> dict[str, Any]:
    body = Reasoned(
        {"error": "%LOCAL_REPLY_BODY%"}, "What Envoy itself answers has the form of errors of v2."
    )
    return {"body_format": {"json_format": body}}


def router() -> dict[str, Any]:
    """The filter that ends every chain."""
    return dict(_ROUTER)


ADMIN: Final = "admin"
READY_PATH: Final = "/ready"
LIVE_PATH: Final = "/live"
METRICS_PATH: Final = "/metrics"
_LOOPBACK: Final = "127.0.0.1"


def admin(port: int) -> dict[str, Any]:
    """The admin interface, which only this machine can reach."""
    return {"address": socket_address(_LOOPBACK, port)}


def admin_cluster(port: int) -> dict[str, Any]:
    """The admin interface as a cluster, for the metrics."""
    at = {"endpoint": {"address": socket_address(_LOOPBACK, port)}}
    load = {"cluster_name": ADMIN, "endpoints": [{"lb_endpoints": [at]}]}
    return {"name": ADMIN, "type": "STATIC", "connect_timeout": "1s", "load_assignment": load}


def status_listener(proxy: Proxy, port: int) -> dict[str, Any]:
    """The port for the node and for Prometheus; ``/metrics`` needs an admin interface."""
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


#: Compute an answer from a request and nothing else. Control operations have other paths.
_GRPC_OF_MODELS: Final = "/inference.GRPCInferenceService/Model"
_HTTP_INFERENCE: Final = "/v2/models/[^/]+(/versions/[^/]+)?/(infer|generate|generate_stream)"
_PREVIOUS_HOSTS: Final = {
    "name": "envoy.retry_host_predicates.previous_hosts",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    },
}


def route_config(proxy: Proxy, cluster: str) -> dict[str, Any]:
    """The same for every listener: a pod answers both protocols on each port (with grpc.aio not on all)."""
    host = {
        "name": cluster,
        "domains": ["*"],
        "include_attempt_count_in_response": Reasoned(
            True, "x-envoy-attempt-count: a client sees whether its request was repeated."
        ),
        "request_body_buffer_limit": proxy.repeated,
        "retry_policy": Reasoned(_REPEAT, _REPEAT_WHY),
        "routes": [
            Reasoned(_NO_ADMIN, _NO_ADMIN_WHY),
            Reasoned(_inference(proxy, cluster, {"prefix": _GRPC_OF_MODELS}), _TIMEOUT_WHY),
            _inference(proxy, cluster, {"safe_regex": {"regex": _HTTP_INFERENCE}}),
            _route(cluster, {"prefix": "/", "headers": [_IS_GET]}),
            Reasoned(_route(cluster, {"prefix": "/"}, retry_policy=_REPEAT_UNSEEN), _UNSEEN_WHY),
        ],
    }
    return {"name": cluster, "virtual_hosts": [host]}


def _inference(proxy: Proxy, cluster: str, match: dict[str, Any]) -> dict[str, Any]:
    """gRPC does not say in its path which model is asked: one that may not run again is enough for all."""
    if proxy.runs_again:
        return _route(cluster, match)
    return _route(cluster, match, retry_policy=Reasoned(_REPEAT_UNSEEN, _ONCE_WHY))


def _route(cluster: str, match: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"match": match, "route": {"cluster": cluster, "timeout": "0s", **more}}


_NO_ADMIN: Final = {
    "match": {"prefix": "/v2/admin/"},
    "direct_response": {"status": 404, "body": {"inline_string": "Not Found"}},
}
_NO_ADMIN_WHY: Final = "The admin API is about one pod, and nobody could tell which: it is not passed on."
_REPEAT_WHY: Final = (
    "Inference is repeated also when a pod dies with it: a pod has no memory of it. Requests of a sequence "
    "belong into one stream, which stays with its pod. A stream that has had an answer, or whose client has "
    "not closed its side, is not repeated: it is reset, or ends with UNAVAILABLE."
)
_TIMEOUT_WHY: Final = (
    "No time limits here: the server keeps to grpc-timeout and timeout, which pass as they came."
)
_ONCE_WHY: Final = (
    "A model has retry_on_worker_death: false, so inference is sent again only where no pod has seen it."
)
_UNSEEN_WHY: Final = "What changes something in a pod is sent again only where the pod has not seen it."
_IS_GET: Final = {"name": ":method", "string_match": {"exact": "GET"}}
_CHOICES: Final = 30
_ELSEWHERE: Final = {
    "num_retries": 3,
    "retry_host_predicate": [_PREVIOUS_HOSTS],
    "host_selection_retry_max_attempts": Reasoned(
        _CHOICES,
        "A dead pod has the fewest requests, so of two pods it is chosen three times in four: that all 31 "
        "choices come to it happens once in 7000 repeats, and there are three.",
    ),
    "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
}
_REPEAT: Final = {
    "retry_on": Reasoned(
        "reset,unavailable,retriable-status-codes",
        "The connection is refused or lost before an answer; UNAVAILABLE and 503: a queue is full, a pod "
        "ends, a worker was lost. Errors of models (500, INTERNAL) are answers.",
    ),
    "retriable_status_codes": [503],
    **_ELSEWHERE,
}
_REPEAT_UNSEEN: Final = {
    "retry_on": "connect-failure,refused-stream,reset-before-request",
    **_ELSEWHERE,
    "host_selection_retry_max_attempts": _CHOICES,
}
