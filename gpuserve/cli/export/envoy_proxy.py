"""Envoy in front of the pods: its bootstrap configuration, and its component. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from gpuserve.cli.export.export_options import export_name
from gpuserve.cli.export.manifest_templates import Reasoned, fill_template, yaml_text
from gpuserve.cli.export.manifest_values import CONNECTION_AGE_S, TLS_FOLDER
from gpuserve.cli.export.pod_sizing import (
    GRPC,
    HEALTH,
    HTTP,
    KIB,
    MIB,
    PROPAGATION_S,
    ServerPorts,
    batch_nbytes,
    readable_size,
    round_up,
)
from gpuserve.config.settings.server import all_access_rules

if TYPE_CHECKING:
    from gpuserve.cli.export.export_options import ExportOptions
    from gpuserve.config.load import Configuration


#: The folder of Envoy's files in its pod.
ENVOY_FOLDER: Final = "/etc/envoy"
ADMIN_PORT: Final = 9901
STATUS_PORT: Final = 9902
#: The heap limit of Envoy's process; the container gets more for code and threads.
HEAP_NBYTES: Final = 1792 * MIB
_LEAST_REPEATED_NBYTES: Final = 1 * MIB
_MOST_REPEATED_NBYTES: Final = 64 * MIB
#: The buffer for models with axes of any size; assumed.
_FREE_REPEATED_NBYTES: Final = 16 * MIB
#: Size of a request besides its tensors.
_ENVELOPE_NBYTES: Final = 64 * KIB


def headless_service(name: str, namespace: str, ports: ServerPorts) -> str:
    """Return the name of the Service of ``export kubernetes`` that has an address for each ready pod."""
    service = f"{name}-{GRPC}" if GRPC in ports.numbers else f"{name}-metrics"
    return f"{service}.{namespace}" if namespace else service


def _retry_buffer_size(configuration: Configuration) -> Reasoned:
    """Return the largest size of a request that Envoy buffers to send it again."""
    batch_sizes = [batch_nbytes(model, model.inputs) for model in configuration.models]
    if None in batch_sizes:
        nbytes = max(_FREE_REPEATED_NBYTES, _within_limits(batch_sizes))
        why = f"Shapes are free, so {readable_size(nbytes)} is assumed."
    else:
        nbytes = _within_limits(batch_sizes)
        why = f"Up to {readable_size(nbytes)}: the largest request of a model, within 1 and 64 MiB."
    why += (
        " A request is kept until its answer begins, and sent again from there. A larger one passes through "
    )
    return Reasoned(nbytes, f"{why}all the same, but is lost with the pod that has it.")


def _within_limits(batch_sizes: Iterable[int | None]) -> int:
    largest = max((size for size in batch_sizes if size is not None), default=0)
    nbytes = round_up(largest + _ENVELOPE_NBYTES, MIB)
    return min(max(nbytes, _LEAST_REPEATED_NBYTES), _MOST_REPEATED_NBYTES)


BOOTSTRAP_FILE: Final = "envoy.yaml"


def envoy_files(configuration: Configuration, options: ExportOptions, host: str = "") -> dict[str, str]:
    """Return the bootstrap file for ``envoy -c`` by name, and with TLS the files that name certificates. The
    pods are behind ``host``, "" for their Service.
    """
    values = _bootstrap_values(configuration, options, host)
    has_tls = bool(ServerPorts.of(configuration.settings, options).tls)
    names = (BOOTSTRAP_FILE, "certificate.yaml", "authority.yaml") if has_tls else (BOOTSTRAP_FILE,)
    return {name: yaml_text(fill_template(f"envoy/{name}", values)) for name in names}


def _bootstrap_values(configuration: Configuration, options: ExportOptions, host: str) -> dict[str, Any]:
    settings, name = configuration.settings, export_name(configuration, options)
    ports = ServerPorts.of(settings, options)
    health_port = ports.numbers.get(HEALTH)
    tokens = (one.token for one in all_access_rules(settings) if "health" in one.groups)
    return {
        "name": name,
        "clusters": [
            {"cluster": one, "port": port, "tls": one in ports.tls, "is_http": one == HTTP}
            for one, port in _request_ports(ports).items()
        ],
        "repeated": _retry_buffer_size(configuration),
        # Whether inference may run again after a pod or worker was lost with the request.
        "runs_again": all(model.retry_on_worker_death for model in configuration.entries.models),
        "host": host or headless_service(name, options.namespace, ports),
        "address": "::" if ":" in settings.host else "0.0.0.0",
        "takes_ipv6": ":" in settings.host,
        "asks_clients_for_certificates": bool(settings.tls_client_ca),
        "health_port": health_port,
        "has_plain_health_port": health_port is not None and bool(ports.tls),
        # The token for the health endpoints, if they require one.
        "health_token": next(tokens, None) if health_port is None else None,
        "admin_port": ADMIN_PORT,
        "status_port": STATUS_PORT,
        "folder": ENVOY_FOLDER,
        "tls_folder": TLS_FOLDER,
        "connection_age_s": CONNECTION_AGE_S,
        "heap_nbytes": HEAP_NBYTES,
        "heap_size": readable_size(HEAP_NBYTES),
    }


def _request_ports(ports: ServerPorts) -> dict[str, int]:
    """Return the ports for requests, which Envoy and the pods have alike."""
    return {one: ports.numbers[one] for one in (HTTP, GRPC) if one in ports.numbers}


#: The version that the tests run; ``images`` of a kustomization replaces it.
_IMAGE: Final = "envoyproxy/envoy:v1.39.3"
#: Envoy ends at once after SIGTERM.
_STOP_S: Final = 5


def component_values(configuration: Configuration, options: ExportOptions) -> dict[str, Any]:
    """Return the values of the kustomize component: two Envoy pods in front of ours."""
    settings, name = configuration.settings, export_name(configuration, options)
    request_ports = _request_ports(ServerPorts.of(settings, options))
    texts = envoy_files(configuration, options)
    joined = "".join(f"{name} {len(text)} {text}" for name, text in texts.items())
    digest = hashlib.sha256(joined.encode()).hexdigest()[:10]
    pre_stop_s = PROPAGATION_S + math.ceil(settings.drain_timeout_s)
    ports = {**request_ports, "status": STATUS_PORT}
    return {
        "envoy_labels": {"app.kubernetes.io/name": "envoy", "app.kubernetes.io/instance": name},
        "envoy_config_name": f"{name}-envoy-{digest}",
        "envoy_files": texts,
        "envoy_file_names": [{"file": file} for file in texts],
        "envoy_folder": ENVOY_FOLDER,
        "envoy_image": _IMAGE,
        "envoy_ports": [{"port_name": name, "port": port} for name, port in ports.items()],
        "envoy_request_ports": [{"port": port} for port in request_ports.values()],
        "envoy_admin_port": ADMIN_PORT,
        "envoy_status_port": STATUS_PORT,
        "envoy_pre_stop_s": pre_stop_s,
        "envoy_stop_s": _STOP_S,
        "envoy_grace_s": pre_stop_s + _STOP_S,
        "propagation_s": PROPAGATION_S,
    }
