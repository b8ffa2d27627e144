"""Values of the templates' placeholders, for pods, autoscalers, config objects, alerts, Compose, Grafana."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from gpuserve.cli.export.config_bundle import ConfigBundle, bundle_config, config_map_key
from gpuserve.cli.export.export_options import MPS, export_name
from gpuserve.cli.export.manifest_templates import fill_template
from gpuserve.cli.export.pod_sizing import (
    GRPC,
    HEALTH,
    HTTP,
    METRICS,
    MIN_READY_S,
    STARTUP_PERIOD_S,
    ServerPorts,
    has_gpus,
    probe_port,
    readable_size,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuserve.cli.export.export_options import ExportOptions
    from gpuserve.cli.export.pod_sizing import PodSizes
    from gpuserve.config.load import Configuration


MIB: Final = 1 << 20
#: The user id of the Dockerfile.
POD_UID: Final = 10001
#: The folder of relative paths, which is writable.
WORKING_FOLDER: Final = "/tmp"  # nosec B108
TLS_FOLDER: Final = "/etc/gpuserve-tls"
_FIRST_UNPRIVILEGED_PORT: Final = 1024
#: The age at which a connection to a pod is closed, so that clients reconnect to other pods as well.
CONNECTION_AGE_S: Final = 300
#: Keys of ``server`` with another default in a pod.
_POD_DEFAULTS: Final = ("log_format", "max_connection_age_s")
_PORTS: Final = (GRPC, HTTP, METRICS, HEALTH)
#: Names of a container's ports, in their order.
PORT_NAMES: Final = {name: name for name in _PORTS}
#: Names that KServe expects: h2c for gRPC; the first port becomes port 80 of its Service.
KSERVE_PORT_NAMES: Final = {HTTP: "http1", GRPC: "h2c", METRICS: METRICS, HEALTH: HEALTH}


#: Target of ``gpuserve_saturation``, the mean of all pods. Up to this value each higher target needs fewer
#: pods under all simulated traffic (docs/autoscaling.md); above, more of a burst is rejected.
SATURATION_TARGET: Final = 0.8


def placeholder_values(
    configuration: Configuration, options: ExportOptions, sizes: PodSizes
) -> dict[str, Any]:
    """Return the value of every placeholder except a pod's parts. Raise ConfigProblems if a file is unfit."""
    settings, name = configuration.settings, export_name(configuration, options)
    # An ensemble has no instances, and its steps are included.
    scaled = dict.fromkeys(model.name for model in configuration.models if model.instances)
    # The labels that select pods; they never change, because a Deployment's selector cannot.
    labels = {"app.kubernetes.io/name": "gpuserve", "app.kubernetes.io/instance": name}
    # The label by which Prometheus selects monitors and rules, in the charts that most clusters use.
    released = {**labels, "release": "prometheus"}
    on_gpu = bool(sizes.gpus.value)
    given_keys = configuration.entries.server.given
    per_node, least_nbytes = options.gpus_per_node, options.min_gpu_memory_nbytes
    # A config with a token has to be a Secret.
    has_token = settings.access_token is not None or bool(settings.access_rules)
    return {
        **alert_values(configuration, options, released),
        **{one.name: getattr(sizes, one.name) for one in dataclasses.fields(sizes)},
        **_port_values(ServerPorts.of(settings, options), settings.tls_client_ca, options.tls_secret, name),
        **_config_object_values(name, bundle_config(configuration), secret=has_token),
        "behavior": fill_template("behavior.yaml", {})[0],
        "saturation_target": SATURATION_TARGET,
        "saturation_target_milli": round(SATURATION_TARGET * 1000),
        "labels": labels,
        "metrics_labels": {**labels, "app.kubernetes.io/component": METRICS},
        "dashboard_labels": {**labels, "grafana_dashboard": "1"},
        "dashboard": dashboard_text(configuration, options),
        "image": options.image,
        "gpu_resource": options.gpu_resource,
        "gpu_resource_path": options.gpu_resource.replace("/", "~1"),
        "gpu_operator": options.gpu_operator,
        "gpu_product": options.gpu_product,
        "selects_node": options.gpu_operator or bool(options.gpu_product),
        "above_gpu_mib": None if least_nbytes is None else str(-(-least_nbytes // MIB) - 1),
        "runtime_class": options.runtime_class,
        # The device plugin mounts the /dev/shm of its MPS daemon into the pod.
        "plugin_mounts_shm": options.gpu_sharing == MPS,
        # Whether a pod uses all GPUs of its node, so that no second pod fits.
        "takes_node": on_gpu
        and not options.gpu_sharing
        and (per_node is None or sizes.gpus.value >= per_node),
        "uid": POD_UID,
        "working_folder": WORKING_FOLDER,
        "tls_folder": TLS_FOLDER,
        "tls_mode": 0o440,
        "connection_age_s": CONNECTION_AGE_S,
        **{f"says_{key}": key in given_keys for key in _POD_DEFAULTS},
        "replicas": options.replicas,
        "most_replicas": options.max_pods,
        "min_ready_s": MIN_READY_S,
        "startup_period_s": STARTUP_PERIOD_S,
        "prometheus": options.prometheus,
        "models": [{"model": name} for name in scaled],
    }


def with_pod_values(
    values: Mapping[str, Any], container: str, port_names: Mapping[str, str], labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values, and the parts of a pod with this container and these labels."""
    numbers: dict[str, int] = values["numbers"]
    ports = [{"port_name": port_names[one], "port": numbers[one]} for one in port_names if one in numbers]
    own = {
        "container_name": container,
        "container_ports": ports,
        "probed_http": port_names.get(values["probed_http"]),
        "pod_labels": labels,
    }
    (filled,) = fill_template("pod.yaml", {**values, **own})
    return {**values, "gpu_node": None, **filled}


def _port_values(ports: ServerPorts, client_ca: str | None, tls_secret: str, name: str) -> dict[str, Any]:
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


#: The folder of the config in the pods.
_FOLDER: Final = "/etc/gpuserve"
_HASH_LENGTH: Final = 10


def _config_object_values(name: str, bundle: ConfigBundle, *, secret: bool) -> dict[str, Any]:
    """Return the values for the ConfigMap, or the Secret if the config has a token, and its volume. Its name
    ends in a hash of the content, so that config and pods roll out and back together.
    """
    digest = hashlib.sha256()
    for path, content in bundle.contents.items():
        digest.update(f"{len(path)} {path} {len(content)} ".encode() + content)
    texts: dict[str, str] = {}
    others: dict[str, str] = {}
    for path, content in bundle.contents.items():
        try:
            texts[config_map_key(path)] = content.decode()
        except UnicodeDecodeError:
            others[config_map_key(path)] = base64.b64encode(content).decode()
    parts = {"stringData": texts, "data": others} if secret else {"data": texts, "binaryData": others}
    return {
        "is_secret": secret,
        "config_kind": "Secret" if secret else "ConfigMap",
        "config_name": f"{name}-config-{digest.hexdigest()[:_HASH_LENGTH]}",
        "config_data": {key: contents for key, contents in parts.items() if contents},
        "config_items": [{"key": config_map_key(path), "path": path} for path in bundle.contents],
        "config_folder": _FOLDER,
        "config_file": bundle.config,
    }


_WARNING_PART: Final = 0.8


def alert_values(
    configuration: Configuration, options: ExportOptions, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the values of the alert rules: the selection of pods, and the memory from which to warn."""
    name, namespace = export_name(configuration, options), options.namespace
    nbytes = configuration.settings.max_arena_nbytes
    return {
        "name": name,
        "namespace": namespace or None,
        "released_labels": labels,
        # The labels that Prometheus attaches to targets of our ServiceMonitor.
        "scraped": f'job="{name}-metrics"' + (f',namespace="{namespace}"' if namespace else ""),
        "arena_warning_nbytes": round(nbytes * _WARNING_PART),
        "arena_size": readable_size(nbytes),
        "on_gpu": has_gpus(configuration, options),
    }


#: The folder of the config in the container.
_COMPOSE_FOLDER: Final = "/models"
#: Time to stop after the drain: workers end, connections are closed.
_END_S: Final = 15
#: The least time before a container counts as unhealthy, because its models may still load.
_LEAST_START_S: Final = 60


def compose_values(
    configuration: Configuration, options: ExportOptions, config: str, mount: str
) -> dict[str, Any]:
    """Return the values for Docker Compose; ``config`` is the path of the config, ``mount`` its folder."""
    settings, name = configuration.settings, export_name(configuration, options)
    ports = ServerPorts.of(settings, options)
    folder = mount if mount.startswith((".", "/")) else f"./{mount}"
    lame_duck_s = settings.lame_duck_s or 0
    return {
        "name": name,
        "image": options.image,
        "config_path": f"{_COMPOSE_FOLDER}/{os.path.basename(config)}",
        "config_mount": f"{folder}:{_COMPOSE_FOLDER}:ro",
        "published_ports": [f"{port}:{port}" for one, port in ports.numbers.items() if one != METRICS],
        "ready_check": _ready_check(ports),
        "start_period": f"{max(_LEAST_START_S, round(settings.load_timeout_s))}s",
        "grace_period": f"{round(lame_duck_s + settings.drain_timeout_s) + _END_S}s",
        "metrics_job": f"{name}-metrics",
        "metrics_target": f"gpuserve:{ports.numbers[METRICS]}",
        "on_gpu": has_gpus(configuration, options),
    }


def _ready_check(ports: ServerPorts) -> str:
    """Return a Python one-liner that fails while the server is not ready; it accepts any certificate."""
    is_tls = HTTP in ports.tls
    scheme, context = ("https", ", context=ssl._create_unverified_context()") if is_tls else ("http", "")
    url = f"{scheme}://localhost:{ports.numbers[HTTP]}/v2/health/ready"
    return f"import ssl, urllib.request as u; u.urlopen('{url}', timeout=4{context})"


_WIDTH: Final = 24
_HEIGHT: Final = 8
_COLUMNS: Final = 3
#: Grafana's limit.
_MAX_UID_LENGTH: Final = 40
_UID_HASH_LENGTH: Final = 8
#: The selector of every query, from the variables at the top of the dashboard.
_PODS: Final = 'job=~"$job",pod=~"$pod"'
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_text(configuration: Configuration, options: ExportOptions) -> str:
    """Return the Grafana dashboard as JSON: rows for users, for queue and instances, and for GPUs."""
    name = uid = export_name(configuration, options)
    if len(name) > _MAX_UID_LENGTH:  # shortened, with a hash that keeps it unique
        digest = hashlib.sha256(name.encode()).hexdigest()[:_UID_HASH_LENGTH]
        uid = f"{name[: _MAX_UID_LENGTH - 1 - _UID_HASH_LENGTH]}-{digest}"
    values = {
        "name": name,
        "uid": uid,
        "on_gpu": has_gpus(configuration, options),
        "source": _SOURCE,
        "of_pods": _PODS,
        "chosen": f'{_PODS},model=~"$model"',
        "quantiles": [{"part": percent / 100, "percent": percent} for percent in (50, 90, 99)],
    }
    (filled,) = fill_template("dashboard.yaml", values)
    panels = list(_panels_with_positions(filled["rows"]))
    return json.dumps({**filled["dashboard"], "panels": panels}, indent=2) + "\n"


def _panels_with_positions(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the panels with their positions, three in a line, below the title of their row."""
    top, number, width = 0, 1, _WIDTH // _COLUMNS
    for row in rows:
        grid = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
        title = {"type": "row", "title": row["title"], "collapsed": False, "panels": []}
        yield {"id": number, **title, "gridPos": grid}
        for index, panel in enumerate(row["panels"]):
            line, column = divmod(index, _COLUMNS)
            grid = {"x": column * width, "y": top + 1 + line * _HEIGHT, "w": width, "h": _HEIGHT}
            yield _panel(panel, number + 1 + index, grid)
        number += 1 + len(row["panels"])
        top = grid["y"] + _HEIGHT


def _panel(panel: dict[str, Any], number: int, grid: dict[str, int]) -> dict[str, Any]:
    targets = []
    for index, line in enumerate(panel["lines"]):
        query = {"datasource": _SOURCE, "expr": line["query"], "legendFormat": line["legend"]}
        targets.append({"refId": chr(ord("A") + index), **query})
    return {
        "id": number,
        "type": "timeseries",
        "title": panel["title"],
        "description": panel.get("description", ""),
        "datasource": _SOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }
