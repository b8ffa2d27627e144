"""Envoy in front of the pods: its settings, its bootstrap configuration, its component. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Self

from gpuserve.config.settings.server import all_access_rules
from gpuserve.export.export_options import export_name
from gpuserve.export.manifest_templates import Reasoned, fill_template, yaml_text
from gpuserve.export.manifest_values import CONNECTION_AGE_S, TLS_FOLDER
from gpuserve.export.pod_sizing import (
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

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.export.export_options import ExportOptions


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


@dataclass(frozen=True, slots=True)
class EnvoyProxy:
    """The settings of an Envoy, whose pods are behind ``host``."""

    name: str
    #: Ports of the pods.
    ports: ServerPorts
    #: Envoy's ports, by the name of the pods' port behind each.
    listen_ports: dict[str, int]
    repeated: Reasoned
    #: Whether inference may run again after a pod or worker was lost with the request.
    runs_again: bool = True
    host: str = ""
    address: str = "0.0.0.0"
    asks_clients_for_certificates: bool = False
    #: The token for the health endpoints, if they require one.
    health_token: str | None = None

    @classmethod
    def of(cls, configuration: Configuration, options: ExportOptions, host: str = "") -> Self:
        """Return the settings for pods of this config; ``host`` "" is their Service."""
        settings, name = configuration.settings, export_name(configuration, options)
        tokens = (one.token for one in all_access_rules(settings) if "health" in one.groups)
        ports = ServerPorts.of(settings, options)
        return cls(
            name=name,
            ports=ports,
            listen_ports={one: ports.numbers[one] for one in (HTTP, GRPC) if one in ports.numbers},
            repeated=_retry_buffer_size(configuration),
            runs_again=all(model.retry_on_worker_death for model in configuration.entries.models),
            host=host or headless_service(name, options.namespace, ports),
            address="::" if ":" in settings.host else "0.0.0.0",
            asks_clients_for_certificates=bool(settings.tls_client_ca),
            health_token=None if HEALTH in ports.numbers else next(tokens, None),
        )

    @property
    def clusters(self) -> list[str]:
        """The names of the pods' ports for requests."""
        return list(self.listen_ports)


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


def envoy_files(proxy: EnvoyProxy) -> dict[str, str]:
    """Return the bootstrap file for ``envoy -c`` by name, and with TLS the files that name certificates."""
    values = _bootstrap_values(proxy)
    names = (BOOTSTRAP_FILE, "certificate.yaml", "authority.yaml") if proxy.ports.tls else (BOOTSTRAP_FILE,)
    return {name: yaml_text(fill_template(f"envoy/{name}", values)) for name in names}


def _bootstrap_values(proxy: EnvoyProxy) -> dict[str, Any]:
    health_port = proxy.ports.numbers.get(HEALTH)
    clusters = [
        {
            "cluster": name,
            "listen_port": port,
            "tls": name in proxy.ports.tls,
            "is_http": name == HTTP,
            "pod_port": proxy.ports.numbers[name],
        }
        for name, port in proxy.listen_ports.items()
    ]
    return {
        **{one.name: getattr(proxy, one.name) for one in fields(proxy)},
        "clusters": clusters,
        "takes_ipv6": proxy.address == "::",
        "health_port": health_port,
        "has_plain_health_port": health_port is not None and bool(proxy.ports.tls),
        "admin_port": ADMIN_PORT,
        "status_port": STATUS_PORT,
        "folder": ENVOY_FOLDER,
        "tls_folder": TLS_FOLDER,
        "connection_age_s": CONNECTION_AGE_S,
        "heap_nbytes": HEAP_NBYTES,
        "heap_size": readable_size(HEAP_NBYTES),
    }


#: The version that the tests run; ``images`` of a kustomization replaces it.
_IMAGE: Final = "envoyproxy/envoy:v1.39.3"
#: Envoy ends at once after SIGTERM.
_STOP_S: Final = 5


def component_values(proxy: EnvoyProxy, drain_timeout_s: float) -> dict[str, Any]:
    """Return the values of the kustomize component: two Envoy pods in front of ours."""
    texts = envoy_files(proxy)
    joined = "".join(f"{name} {len(text)} {text}" for name, text in texts.items())
    digest = hashlib.sha256(joined.encode()).hexdigest()[:10]
    pre_stop_s = PROPAGATION_S + math.ceil(drain_timeout_s)
    ports = {**proxy.listen_ports, "status": STATUS_PORT}
    return {
        "envoy_labels": {"app.kubernetes.io/name": "envoy", "app.kubernetes.io/instance": proxy.name},
        "envoy_config_name": f"{proxy.name}-envoy-{digest}",
        "envoy_files": texts,
        "envoy_file_names": [{"file": file} for file in texts],
        "envoy_folder": ENVOY_FOLDER,
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
