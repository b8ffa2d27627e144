"""Envoy in the cluster: two pods of it in front of ours, as a kustomize component."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final

from gpuserve.export.envoy import bootstrap
from gpuserve.export.envoy.proxy import ADMIN_PORT, FOLDER, STATUS_PORT, Proxy
from gpuserve.export.sizing.sizing import PROPAGATION_S

#: The version that the tests run. A kustomization's ``images`` names another.
_IMAGE: Final = "envoyproxy/envoy:v1.39.3"
#: Envoy ends at once when it is told to.
_STOP_S: Final = 5


def component_places(proxy: Proxy, drain_timeout_s: float) -> dict[str, Any]:
    """The places of the component, beside those of the pods that Envoy stands in front of."""
    texts = bootstrap.files(proxy)
    pre_stop_s = PROPAGATION_S + math.ceil(drain_timeout_s)
    ports = {**proxy.listen_ports, "status": STATUS_PORT}
    return {
        "envoy_labels": {"app.kubernetes.io/name": "envoy", "app.kubernetes.io/instance": proxy.name},
        "envoy_config_name": f"{proxy.name}-envoy-{_digest(texts)}",
        "envoy_files": texts,
        "envoy_file_names": [{"file": file} for file in texts],
        "envoy_folder": FOLDER,
        "envoy_image": _IMAGE,
        "envoy_ports": [{"port_name": name, "port": port} for name, port in ports.items()],
        "envoy_request_ports": [{"port": port} for port in proxy.listen_ports.values()],
        "envoy_admin_port": ADMIN_PORT,
        "envoy_status_port": STATUS_PORT,
        "envoy_pre_stop_s": pre_stop_s,
        "envoy_stop_s": _STOP_S,
        "envoy_grace_s": pre_stop_s + _STOP_S,
        "propagation_s": PROPAGATION_S,
    }


def _digest(texts: Mapping[str, str]) -> str:
    joined = "".join(f"{name} {len(text)} {text}" for name, text in texts.items())
    return hashlib.sha256(joined.encode()).hexdigest()[:10]
