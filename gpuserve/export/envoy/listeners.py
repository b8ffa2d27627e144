"""The ports of Envoy that clients use."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.envoy.routes import route_config
from gpuserve.export.envoy.tls import downstream
from gpuserve.export.pod_defaults import CONNECTION_AGE_S
from gpuserve.export.ports import HTTP
from gpuserve.export.quantities import MIB
from gpuserve.export.reasoned import Reasoned

_MANAGER: Final = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER: Final = {
    "name": "envoy.filters.http.router",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
        "suppress_envoy_headers": True,
    },
}


def listener(proxy: Proxy, name: str) -> dict[str, Any]:
    """In front of the pods' port of this name."""
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
    """A filter that speaks HTTP."""
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
