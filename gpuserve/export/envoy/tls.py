"""TLS on both sides, with the certificate of the pods. Envoy reads its files anew when they are renewed."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.sizing.values import Reasoned

_CERTIFICATE: Final = "certificate"
_AUTHORITY: Final = "authority"
_SOCKETS: Final = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_NAME: Final = "envoy.transport_sockets.tls"
_LEAST: Final = {"tls_minimum_protocol_version": "TLSv1_2"}


def secrets(proxy: Proxy) -> dict[str, dict[str, Any]]:
    """Where the certificates are, and that their folder is watched: by the file beside the bootstrap, since
    Envoy takes one secret from each.
    """
    folder = proxy.tls_folder
    watched = {"watched_directory": {"path": folder}}
    certificate = {
        "certificate_chain": {"filename": f"{folder}/tls.crt"},
        "private_key": {"filename": f"{folder}/tls.key"},
        **watched,
    }
    why = "Of the pods' certificate, and of clients' certificates where the pods ask for them."
    authority = {"trusted_ca": Reasoned({"filename": f"{folder}/ca.crt"}, why), **watched}
    named: dict[str, dict[str, Any]] = {
        _CERTIFICATE: {"tls_certificate": certificate},
        _AUTHORITY: {"validation_context": authority},
    }
    return {
        f"{name}.yaml": {"resources": [{"@type": f"{_SOCKETS}.Secret", "name": name, **secret}]}
        for name, secret in named.items()
    }


def downstream(proxy: Proxy) -> dict[str, Any]:
    """The TLS transport for a listener in front of a port that speaks TLS."""
    common: dict[str, Any] = {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_params": dict(_LEAST),
        "tls_certificate_sds_secret_configs": [_secret(proxy, _CERTIFICATE)],
    }
    asks: dict[str, Any] = {}
    if proxy.asks_clients_for_certificates:
        common["validation_context_sds_secret_config"] = _secret(proxy, _AUTHORITY)
        asks = {"require_client_certificate": True}
    context = {"@type": f"{_SOCKETS}.DownstreamTlsContext", "common_tls_context": common, **asks}
    return {"name": _NAME, "typed_config": context}


def upstream(proxy: Proxy) -> dict[str, Any]:
    """The TLS transport for a cluster of ports that speak TLS."""
    named = {"san_type": "DNS", "matcher": {"exact": proxy.name}}
    combined = {
        "default_validation_context": {
            "match_typed_subject_alt_names": [
                Reasoned(named, "A name that the certificate has to have, whatever the address of the pod.")
            ]
        },
        "validation_context_sds_secret_config": _secret(proxy, _AUTHORITY),
    }
    common: dict[str, Any] = {
        "alpn_protocols": ["h2"],
        "tls_params": dict(_LEAST),
        "combined_validation_context": combined,
    }
    if proxy.asks_clients_for_certificates:
        own = _secret(proxy, _CERTIFICATE)
        why = "The pods ask for a certificate: this one has to be good for clients as well."
        common["tls_certificate_sds_secret_configs"] = [Reasoned(own, why)]
    context = {"@type": f"{_SOCKETS}.UpstreamTlsContext", "sni": proxy.name, "common_tls_context": common}
    return {"name": _NAME, "typed_config": context}


def _secret(proxy: Proxy, name: str) -> dict[str, Any]:
    source = {"path_config_source": {"path": f"{proxy.folder}/{name}.yaml"}}
    return {"name": name, "sds_config": source}
