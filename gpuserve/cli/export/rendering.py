"""A whole export, from the configuration to written files: checks, sizes, rendered templates, output."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import os
import posixpath
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuserve.cli.export import envoy_proxy, manifest_values
from gpuserve.cli.export.export_options import (
    GPU_RESOURCE,
    LABEL_FORM,
    ExportFinding,
    export_name,
    host_violations,
    image_findings,
    is_label_value,
    is_object_name,
    model_names,
    namespace_violations,
    option_violations,
    problems_of,
    quoted,
)
from gpuserve.cli.export.manifest_templates import fill_template, yaml_text
from gpuserve.cli.export.manifest_values import WORKING_FOLDER, alert_values, compose_values, dashboard_text
from gpuserve.cli.export.pod_sizing import (
    InstanceGroup,
    ServerPorts,
    compute_sizes,
    gpu_memory,
    instance_groups,
    probe_port,
    readable_size,
)
from gpuserve.cli.export.systemd_units import port_findings, systemd_units
from gpuserve.config.problems import ConfigProblems, Origin, Problem
from gpuserve.core.errors import GpuserveError
from gpuserve.devices.names import EVERY_GPU, devices_of, is_uuid, number_of

if TYPE_CHECKING:
    from gpuserve.cli.export.export_options import ExportOptions
    from gpuserve.cli.export.pod_sizing import PodSizes
    from gpuserve.config.load import Configuration
    from gpuserve.config.settings.server import ServerSettings

#: Texts of files, by their paths relative to the output folder.
ExportFiles = dict[str, str]


_BASE: Final = (
    "config.yaml", "serviceaccount.yaml", "deployment.yaml", "services.yaml", "networkpolicy.yaml",
    "disruptionbudget.yaml", "autoscaler.yaml",
)  # fmt: skip
#: The files of each component beside its kustomization. Components change the base; unlike overlays they can
#: be combined with each other and with an overlay of the user's own.
_COMPONENTS: Final = {
    "surge": (),
    "writable-root": (),
    "dra": ("resourceclaimtemplate.yaml",),
    "daemonset": (),
    "keda": ("scaledobject.yaml",),
    "monitoring": ("servicemonitor.yaml", "prometheusrule.yaml", "dashboard.yaml"),
    "envoy": (
        "config.yaml",
        "deployment.yaml",
        "service.yaml",
        "networkpolicy.yaml",
        "disruptionbudget.yaml",
    ),
}
_ONLY_ON_GPU: Final = {"surge", "writable-root", "dra"}
#: The template of each file for Docker Compose, by the path at which Prometheus or Grafana reads the file.
_COMPOSE: Final = {
    "compose.yaml": "compose/compose.yaml",
    "prometheus.yaml": "compose/prometheus.yaml",
    "grafana/datasources.yaml": "compose/datasources.yaml",
    "grafana/dashboards.yaml": "compose/dashboards.yaml",
}
_PROMETHEUS_RULE: Final = "components/monitoring/prometheusrule.yaml"


def kubernetes_files(configuration: Configuration, options: ExportOptions) -> ExportFiles:
    """Return a kustomize base, its components, and an overlay for each, or raise ConfigProblems."""
    values = _base_values(configuration, options) | {"resources": list(_BASE)}
    values |= envoy_proxy.component_values(configuration, options)
    names = [f"base/{file}" for file in (*_BASE, "kustomization.yaml")]
    files = {name: yaml_text(fill_template(name, values)) for name in names}
    for component, others in _COMPONENTS.items():
        if values["on_gpu"] or component not in _ONLY_ON_GPU:
            names = [f"components/{component}/{file}" for file in ("kustomization.yaml", *others)]
            files |= {name: yaml_text(fill_template(name, values)) for name in names}
            overlay = yaml_text(fill_template("overlay.yaml", {"component": component}))
            files[f"overlays/{component}/kustomization.yaml"] = overlay
    return files


def kubernetes_stream(configuration: Configuration, options: ExportOptions) -> str:
    """Return the base's objects as one stream for ``kubectl apply -f -``, or raise ConfigProblems."""
    values = _base_values(configuration, options)
    return yaml_text([one for file in _BASE for one in fill_template(f"base/{file}", values)])


def kserve_stream(configuration: Configuration, options: ExportOptions) -> str:
    """Return ServingRuntime, InferenceService and their config, for KServe's Standard mode: Knative allows a
    pod one port only. The service, not the runtime, sets grace period and security context, because a runtime
    cannot.
    """
    values = export_values(configuration, options)
    labels = {"serving.kserve.io/inferenceservice": values["name"]}
    # KServe looks for a container of this name.
    values = manifest_values.with_pod_values(
        values, "kserve-container", manifest_values.KSERVE_PORT_NAMES, labels
    )
    return yaml_text([*fill_template("base/config.yaml", values), *fill_template("kserve.yaml", values)])


def grafana_text(configuration: Configuration, options: ExportOptions) -> str:
    """Return the dashboard as JSON. Raise ConfigProblems without a metrics page, or for a malformed name."""
    _raise_if_any(configuration, monitoring_violations(configuration, options))
    return dashboard_text(configuration, options)


def alerts_text(configuration: Configuration, options: ExportOptions, *, plain: bool = False) -> str:
    """Return the rules as a PrometheusRule, or if ``plain`` as a rule file of Prometheus. Raise as
    ``grafana_text``.
    """
    _raise_if_any(configuration, monitoring_violations(configuration, options))
    documents = fill_template(_PROMETHEUS_RULE, alert_values(configuration, options))
    return yaml_text([one["spec"] for one in documents] if plain else documents)


def compose_files(
    configuration: Configuration, options: ExportOptions, config: str, mount: str
) -> ExportFiles:
    """Return the files for one server with Prometheus and Grafana in Docker Compose. ``mount`` is the folder
    of the config, relative to the folder of the files. Raise ConfigProblems if no image is named, or the
    metrics page is switched off.
    """
    _raise_if_any(configuration, compose_violations(configuration, options))
    values = compose_values(configuration, options, config, mount)
    files = {path: yaml_text(fill_template(template, values)) for path, template in _COMPOSE.items()}
    return files | {
        "rules.yaml": alerts_text(configuration, options, plain=True),
        "dashboard.json": grafana_text(configuration, options),
    }


def systemd_files(
    configuration: Configuration, options: ExportOptions, config: str, user: str
) -> ExportFiles:
    """Return the unit files for systemd, or raise ConfigProblems for a malformed name, host or port."""
    ports = port_findings(configuration.settings)
    _raise_if_any(configuration, itertools.chain(_name_findings(configuration, options), ports))
    return systemd_units(configuration, options, config, user)


def envoy_config_files(configuration: Configuration, options: ExportOptions, host: str = "") -> ExportFiles:
    """Return the configuration of Envoy in front of the pods of ``host``, "" for their headless Service."""
    _raise_if_any(configuration, balancer_violations(configuration, options, host))
    return envoy_proxy.envoy_files(configuration, options, host)


def export_values(configuration: Configuration, options: ExportOptions) -> dict[str, Any]:
    """Return the values of the templates' placeholders, or raise ConfigProblems."""
    _raise_if_any(configuration, cluster_violations(configuration, options))
    computed = compute_sizes(configuration, options)
    groups = instance_groups(configuration, options)
    _raise_if_any(configuration, fit_violations(configuration, options, computed, groups))
    return manifest_values.placeholder_values(configuration, options, computed)


def _base_values(configuration: Configuration, options: ExportOptions) -> dict[str, Any]:
    values = export_values(configuration, options)
    return manifest_values.with_pod_values(values, "gpuserve", manifest_values.PORT_NAMES, values["labels"])


def _raise_if_any(configuration: Configuration, found: Iterator[ExportFinding]) -> None:
    if found_problems := problems_of(configuration, found):
        raise ConfigProblems(found_problems)


#: The mode of a file that holds a token: readable by its owner only.
_SECRET_MODE: Final = 0o600
_USUAL_MODE: Final = 0o666
#: Marks of a file that holds a token: a Secret, or the header with a token in a configuration of Envoy.
_SECRETS: Final = ("kind: Secret\n", "key: authorization\n")


def write_files(folder: str, files: ExportFiles) -> None:
    """Write every file below the folder, which is created; other files stay. Raise ConfigProblems if the
    folder cannot be written; then all files are unchanged, unless moving a written file failed.
    """
    if not folder:
        raise _out_problem("expected a folder, given ''")
    out = Path(folder)
    try:
        for taken in (out / name for name in files if (out / name).is_dir()):
            raise IsADirectoryError(errno.EISDIR, f"{taken.name} is a directory")
        existing = next(one for one in (out, *out.absolute().parents) if one.is_dir())
        with tempfile.TemporaryDirectory(prefix=".gpuserve-", dir=existing) as staging:
            for name, text in files.items():
                path = Path(staging, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(_SECRET_MODE if any(mark in text for mark in _SECRETS) else _USUAL_MODE)
                path.write_text(text, encoding="utf-8")
            for name in files:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                Path(staging, name).replace(out / name)
    except OSError as error:
        raise _out_problem(f"{folder!r} cannot be written: {_os_reason(error)}") from None


def write_stdout(text: str) -> None:
    """Write to stdout. Raise GpuserveError if stdout cannot be written, BrokenPipeError if nobody reads."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - the flush at exit must not fail again
        raise GpuserveError(f"stdout cannot be written: {_os_reason(error)}") from None


def _out_problem(text: str) -> ConfigProblems:
    return ConfigProblems([Problem("--out", text, Origin.FLAG)])


def _os_reason(error: OSError) -> str:
    return (error.strerror or "unknown reason").lower()


_TIME_KEYS: Final = ("lame_duck_s", "drain_timeout_s", "load_timeout_s")
#: Grace periods and probe counts are signed 32-bit integers, and some of these durations are added.
_LONGEST_S: Final = 500_000_000
_WRITABLE: Final = ("/tmp/", "/dev/")  # nosec B108


def monitoring_violations(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    """Yield findings for exports without a pod: alerts and dashboards."""
    yield from _name_findings(configuration, options)
    if configuration.settings.metrics_port is None:
        text = "null switches off the metrics page, which an export needs"
        yield ("server", "metrics_port"), text


def compose_violations(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    """Yield findings for one server in a container with a metrics page and an HTTP health check."""
    yield from monitoring_violations(configuration, options)
    yield from image_findings(options.image)
    if configuration.settings.http_port is None:
        text = "null switches off HTTP, which the container's health check uses"
        yield ("server", "http_port"), text
    yield from _reach_findings(configuration.settings)


def balancer_violations(
    configuration: Configuration, options: ExportOptions, host: str = ""
) -> Iterator[ExportFinding]:
    """Yield findings for a balancer in front of the pods."""
    yield from host_violations(host)
    yield from _name_findings(configuration, options)
    yield from _reach_findings(configuration.settings)


def cluster_violations(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    """Yield all findings that need no computed sizes."""
    yield from option_violations(options)
    yield from monitoring_violations(configuration, options)
    yield from _label_findings(configuration)
    yield from _network_findings(configuration, options)
    settings = configuration.settings
    for key in _TIME_KEYS:
        given = getattr(settings, key)
        if given is not None and given > _LONGEST_S:
            text = f"expected at most {_LONGEST_S} s for a pod, given {given:g}"
            yield ("server", key), text
    for index, model in enumerate(configuration.entries.models):
        for position, entry in enumerate(model.instances if model.ensemble is None else ()):
            problems = (_device_problem(one, options) for one in devices_of(entry.device))
            if text := next(filter(None, problems), ""):
                yield ("models", index, "instances", position, "device"), text
    for key in ("trace", "log"):
        file = getattr(settings, key).file
        if file and not posixpath.normpath(posixpath.join(WORKING_FOLDER, file)).startswith(_WRITABLE):
            text = f"{file!r} cannot be written in a pod, whose root is read only; write into /tmp"
            yield ("server", key, "file"), text


def fit_violations(
    configuration: Configuration, options: ExportOptions, computed: PodSizes, groups: list[InstanceGroup]
) -> Iterator[ExportFinding]:
    """Yield findings about sizes that exceed a node."""
    yield from _node_memory_findings(options, computed)
    yield from _node_cpu_findings(options, computed, groups)
    yield from _gpu_memory_findings(configuration, options, groups)
    if options.gpu_sharing and computed.gpus.value > 1:
        text = f"a pod would get {computed.gpus.value} shares, which may be of one GPU: expected cuda:0 only"
        yield "--gpu-sharing", text


def _name_findings(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    yield from namespace_violations(options)
    name = export_name(configuration, options)
    if is_object_name(name):
        return
    if options.name:
        yield "--name", f"{quoted(name)} is no DNS label: {LABEL_FORM}"
        return
    text = f"the objects of the cluster would be called {quoted(name)}, which is no DNS label ({LABEL_FORM})"
    yield ("models", 0, "name"), f"{text}; give them a name with --name"


def _label_findings(configuration: Configuration) -> Iterator[ExportFinding]:
    names = [model.name for model in configuration.models]
    for name in model_names(configuration):
        if not is_label_value(name):
            text = f"{quoted(name)} cannot be the value of a label, by which the autoscaler selects metrics: "
            text += "at most 63 characters, a letter or digit first and last"
            yield ("models", names.index(name), "name"), text


def _network_findings(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    settings = configuration.settings
    yield from _reach_findings(settings)
    is_served = settings.http_port is not None or settings.grpc_port is not None
    if is_served and probe_port(ServerPorts.of(settings, options)) is None:
        text = "the node checks health without TLS, and every port requires TLS; set server.health_port"
        yield ("server", "tls_ports"), text
    restricted = "restricted_endpoints" if "health" in settings.restricted_endpoints else ""
    if any("health" in rule.groups for rule in settings.access_rules):
        restricted = restricted or "access_rules"
    if settings.health_port is None and restricted:
        text = "the node checks health without a token; set server.health_port"
        yield ("server", restricted), text


def _reach_findings(settings: ServerSettings) -> Iterator[ExportFinding]:
    for role, port in settings.ports.items():
        if port == 0:
            yield ("server", f"{role}_port"), "0 picks a free port, and a Service needs a fixed one"
    if settings.http_port is None and settings.grpc_port is None:
        text = "neither HTTP nor gRPC is served, so clients cannot connect"
        yield ("server", "http_port"), text
    for key in ("host", "grpc_host", "metrics_host"):
        host = getattr(settings, key)
        with contextlib.suppress(ValueError):
            if host is None or ipaddress.ip_address(host).is_unspecified:
                continue
        text = f"{host!r} cannot be reached from outside a pod; expected 0.0.0.0 or '::'"
        yield ("server", key), text


def _device_problem(device: str, options: ExportOptions) -> str:
    """Return why no pod can have this device, or ""."""
    if is_uuid(device):
        slices = "; for MIG slices also --gpu-resource nvidia.com/mig-1g.10gb" if device[0] == "M" else ""
        return f"{device!r} is one GPU of one machine, and a pod runs on any: write cuda:0{slices}"
    if device == EVERY_GPU and options.gpus_per_node is None:
        return "how many GPUs 'cuda:*' stands for depends on the node: give --gpus-per-node"
    number, gpus_per_node = number_of(device), options.gpus_per_node
    if number is not None and gpus_per_node is not None and number >= gpus_per_node:
        return f"{device!r} needs {number + 1} GPUs, and a node has {gpus_per_node} (--gpus-per-node)"
    return ""


def _node_memory_findings(options: ExportOptions, computed: PodSizes) -> Iterator[ExportFinding]:
    node_nbytes = options.node_memory_nbytes
    if node_nbytes is None or computed.memory_nbytes <= node_nbytes:
        return
    largest = max(computed.parts, key=lambda part: part.nbytes)
    most, largest_nbytes = readable_size(computed.memory_nbytes), readable_size(largest.nbytes)
    text = f"a pod may take {most} of memory, and a node has {readable_size(node_nbytes)} (--node-memory): "
    text += f"{largest_nbytes} of it is {largest.name}"
    yield largest.path, text


def _node_cpu_findings(
    options: ExportOptions, computed: PodSizes, groups: list[InstanceGroup]
) -> Iterator[ExportFinding]:
    if options.node_cpus is None or computed.cpus.value <= options.node_cpus:
        return
    largest = max(groups, key=lambda group: group.processes * group.resources.cpus)
    text = (
        f"a pod takes {computed.cpus.value} cores, and a node has {options.node_cpus} (--node-cpus): "
        f"{largest.processes} x {largest.resources.cpus} of them belong to these instances"
    )
    yield (*largest.path, "resources", "cpus"), text


def _gpu_memory_findings(
    configuration: Configuration, options: ExportOptions, groups: list[InstanceGroup]
) -> Iterator[ExportFinding]:
    if options.gpu_memory_nbytes is None:
        return
    for number, taken in sorted(gpu_memory(groups).items()):
        total = sum(nbytes for _, nbytes in taken)
        if total > options.gpu_memory_nbytes:
            last = taken[-1][0]
            names = ", ".join(
                f"{configuration.models[group.model].name} {readable_size(nbytes)}" for group, nbytes in taken
            )
            what = "a slice" if options.gpu_resource != GPU_RESOURCE else "a GPU"
            most = readable_size(options.gpu_memory_nbytes)
            text = f"cuda:{number} would hold {readable_size(total)} ({names}), and {what} has {most}"
            text += " (--gpu-memory)"
            yield (*last.path, "resources", "gpu_memory_nbytes"), text
            return  # the next GPU has the same models
