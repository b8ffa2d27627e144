"""What the manifests are filled in with: the places of a whole export, and the parts of its pods."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from gpuserve.export.manifests import config_objects, scaling
from gpuserve.export.manifests.alerts import alert_places
from gpuserve.export.manifests.dashboard import dashboard_text
from gpuserve.export.sizing.files import bundle
from gpuserve.export.sizing.options import export_name
from gpuserve.export.sizing.ports import GRPC, HEALTH, HTTP, METRICS, ServerPorts, probe_port
from gpuserve.export.sizing.sizing import MIN_READY_S, STARTUP_PERIOD_S
from gpuserve.export.templates.filling import filled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuserve.config.load import Configuration
    from gpuserve.export.sizing.options import ExportOptions
    from gpuserve.export.sizing.sizing import Sizes

#: The user of the Dockerfile.
UID: Final = 10001
#: Where relative paths begin, and what is written can be.
WORKING_FOLDER: Final = "/tmp"  # nosec B108
TLS_FOLDER: Final = "/etc/gpuserve-tls"
_FIRST_UNPRIVILEGED_PORT: Final = 1024
#: A connection to a pod is made anew after so long.
CONNECTION_AGE_S: Final = 300
#: Keys of ``server`` that have another default in a pod.
_POD_DEFAULTS: Final = ("log_format", "max_connection_age_s")
_PORTS: Final = (GRPC, HTTP, METRICS, HEALTH)
#: What a container calls its ports, in the order in which it lists them.
PORT_NAMES: Final = {name: name for name in _PORTS}
#: KServe takes a port of this name for gRPC, and makes the first one port 80 of its Service.
KSERVE_PORT_NAMES: Final = {HTTP: "http1", GRPC: "h2c", METRICS: METRICS, HEALTH: HEALTH}


def export_places(configuration: Configuration, options: ExportOptions, sizes: Sizes) -> dict[str, Any]:
    """Every place of the templates but a pod's parts; ConfigProblems: a file cannot be in a ConfigMap."""
    settings, name = configuration.settings, export_name(configuration, options)
    # By which pods are found; never changed, since a Deployment's selector cannot be.
    labels = {"app.kubernetes.io/name": "gpuserve", "app.kubernetes.io/instance": name}
    # Where Prometheus looks for monitors and rules of its own accord, in the charts that most clusters have.
    released = {**labels, "release": "prometheus"}
    on_gpu = bool(sizes.gpus.value)
    nbytes = settings.max_arena_nbytes
    per_node = options.gpus_per_node
    return {
        **alert_places(name, options.namespace, released, max_arena_nbytes=nbytes, on_gpu=on_gpu),
        **{one.name: getattr(sizes, one.name) for one in dataclasses.fields(sizes)},
        **_port_places(ServerPorts.of(settings, options), settings.tls_client_ca, options.tls_secret, name),
        **config_objects.places(name, bundle(configuration), secret=config_objects.holds_token(settings)),
        **scaling_places(),
        "labels": labels,
        "metrics_labels": {**labels, "app.kubernetes.io/component": METRICS},
        "dashboard_labels": {**labels, "grafana_dashboard": "1"},
        "dashboard": dashboard_text(name, on_gpu=on_gpu),
        "image": options.image,
        "gpu_resource": options.gpu_resource,
        # No second pod has a place on a node where every GPU is taken, as far as is known.
        "takes_node": on_gpu and (per_node is None or sizes.gpus.value >= per_node),
        "uid": UID,
        "working_folder": WORKING_FOLDER,
        "tls_folder": TLS_FOLDER,
        "tls_mode": 0o440,
        "connection_age_s": CONNECTION_AGE_S,
        **{f"says_{key}": key in said(configuration) for key in _POD_DEFAULTS},
        "replicas": options.replicas,
        "most_replicas": options.most_replicas,
        "min_ready_s": MIN_READY_S,
        "startup_period_s": STARTUP_PERIOD_S,
        "prometheus": options.prometheus,
        "models": [{"model": name} for name in scaled_models(configuration)],
    }


def with_pod(
    places: Mapping[str, Any], container: str, port_names: Mapping[str, str], labels: Mapping[str, str]
) -> dict[str, Any]:
    """The places, and with them the parts of a pod with this container and these labels."""
    numbers: dict[str, int] = places["numbers"]
    own = {
        "container_name": container,
        "container_ports": [
            {"port_name": port_names[name], "port": numbers[name]} for name in port_names if name in numbers
        ],
        "probed_http": port_names.get(places["probed_http"]),
        "pod_labels": labels,
    }
    (made,) = filled("pod.yaml", {**places, **own})
    return {**places, "gpu_node": None, **made}


def said(configuration: Configuration) -> frozenset[str]:
    """The keys of ``server`` that the config file has."""
    given: frozenset[str] = configuration.entries.server.given
    return given


def scaled_models(configuration: Configuration) -> list[str]:
    """The models with instances, each once; an ensemble has none, and its steps are here."""
    return list(dict.fromkeys(model.name for model in configuration.models if model.instances))


def scaling_places() -> dict[str, Any]:
    (behavior,) = filled("behavior.yaml", {name.lower(): value for name, value in vars(scaling).items()})
    return {
        "behavior": behavior,
        "saturation_target": scaling.SATURATION_TARGET,
        "saturation_target_milli": round(scaling.SATURATION_TARGET * 1000),
    }


def _port_places(ports: ServerPorts, client_ca: str | None, tls_secret: str, name: str) -> dict[str, Any]:
    probed = probe_port(ports)
    asks_grpc = probed in (GRPC, HEALTH)
    return {
        "numbers": ports.numbers,
        **{f"{one}_port": ports.numbers.get(one) for one in _PORTS},
        **{f"{one}_protocol": ports.app_protocol(one) for one in _PORTS},
        "http_service_port": 443 if HTTP in ports.tls else 80,
        "request_ports": [{"port": ports.numbers[one]} for one in (GRPC, HTTP) if one in ports.numbers],
        "probed_grpc": ports.numbers[probed] if probed and asks_grpc else None,
        "probed_http": None if asks_grpc else probed,
        "has_low_port": any(port < _FIRST_UNPRIVILEGED_PORT for port in ports.numbers.values()),
        "tls_secret": (tls_secret or f"{name}-tls") if ports.tls else "",
        "metrics_tls": METRICS in ports.tls,
        "asks_for_certificates": bool(ports.tls and client_ca),
    }
