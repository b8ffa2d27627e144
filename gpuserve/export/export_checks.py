"""Checks of a configuration and of flags for use in a cluster; each finding names key and place."""

from __future__ import annotations

import contextlib
import ipaddress
import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gpuserve.devices.names import EVERY_GPU, is_uuid, number_of
from gpuserve.export.export_options import (
    GPU_RESOURCE,
    LABEL_FORM,
    ExportFinding,
    export_name,
    flag_finding,
    host_violations,
    image_findings,
    is_label_value,
    is_object_name,
    model_names,
    namespace_violations,
    option_violations,
    quoted,
)
from gpuserve.export.manifest_values import WORKING_FOLDER
from gpuserve.export.pod_sizing import InstanceGroup, ServerPorts, gpu_memory, probe_port, readable_size
from gpuserve.export.systemd_units import port_findings

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.settings.server import ServerSettings
    from gpuserve.export.export_options import ExportOptions
    from gpuserve.export.pod_sizing import PodSizes


_PORT_KEYS: Final = ("http_port", "grpc_port", "metrics_port", "health_port")
_TIME_KEYS: Final = ("lame_duck_s", "drain_timeout_s", "load_timeout_s")
#: Grace periods and probe counts are signed 32-bit integers, and some of these durations are added.
_LONGEST_S: Final = 500_000_000
_WRITABLE: Final = ("/tmp/", "/dev/")  # nosec B108


def monitoring_violations(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    """Yield findings for exports without a pod: alerts and dashboards."""
    yield from _name_findings(configuration, options)
    if configuration.settings.metrics_port is None:
        text = "null switches off the metrics page, which an export needs"
        yield ExportFinding(("server", "metrics_port"), text)


def compose_violations(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    """Yield findings for one server in a container with a metrics page and an HTTP health check."""
    yield from monitoring_violations(configuration, options)
    yield from image_findings(options.image)
    if configuration.settings.http_port is None:
        text = "null switches off HTTP, which the container's health check uses"
        yield ExportFinding(("server", "http_port"), text)
    yield from _reach_findings(configuration.settings)


def systemd_violations(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    """Yield findings for a service of systemd and the socket unit with its ports."""
    yield from _name_findings(configuration, options)
    yield from port_findings(configuration.settings)


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
            yield ExportFinding(("server", key), text)
    for index, model in enumerate(configuration.entries.models):
        for position, entry in enumerate(model.instances if model.ensemble is None else ()):
            if text := _device_problem(entry.device, options):
                yield ExportFinding(("models", index, "instances", position, "device"), text)
    for key in ("trace", "log"):
        file = getattr(settings, key).file
        if file and not posixpath.normpath(posixpath.join(WORKING_FOLDER, file)).startswith(_WRITABLE):
            text = f"{file!r} cannot be written in a pod, whose root is read only; write into /tmp"
            yield ExportFinding(("server", key, "file"), text)


def fit_violations(
    configuration: Configuration, options: ExportOptions, computed: PodSizes, groups: list[InstanceGroup]
) -> Iterator[ExportFinding]:
    """Yield findings about sizes that exceed a node."""
    yield from _node_memory_findings(options, computed)
    yield from _node_cpu_findings(options, computed, groups)
    yield from _gpu_memory_findings(configuration, options, groups)
    if options.gpu_sharing and computed.gpus.value > 1:
        text = f"a pod would get {computed.gpus.value} shares, which may be of one GPU: expected cuda:0 only"
        yield flag_finding("--gpu-sharing", text)


def _name_findings(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    yield from namespace_violations(options)
    name = export_name(configuration, options)
    if is_object_name(name):
        return
    if options.name:
        yield flag_finding("--name", f"{quoted(name)} is no DNS label: {LABEL_FORM}")
        return
    text = f"the objects of the cluster would be called {quoted(name)}, which is no DNS label ({LABEL_FORM})"
    yield ExportFinding(("models", 0, "name"), f"{text}; give them a name with --name")


def _label_findings(configuration: Configuration) -> Iterator[ExportFinding]:
    names = [model.name for model in configuration.models]
    for name in model_names(configuration):
        if not is_label_value(name):
            text = f"{quoted(name)} cannot be the value of a label, by which the autoscaler selects metrics: "
            text += "at most 63 characters, a letter or digit first and last"
            yield ExportFinding(("models", names.index(name), "name"), text)


def _network_findings(configuration: Configuration, options: ExportOptions) -> Iterator[ExportFinding]:
    settings = configuration.settings
    yield from _reach_findings(settings)
    is_served = settings.http_port is not None or settings.grpc_port is not None
    if is_served and probe_port(ServerPorts.of(settings, options)) is None:
        text = "the node checks health without TLS, and every port requires TLS; set server.health_port"
        yield ExportFinding(("server", "tls_ports"), text)
    restricted = "restricted_endpoints" if "health" in settings.restricted_endpoints else ""
    if any("health" in rule.groups for rule in settings.access_rules):
        restricted = restricted or "access_rules"
    if settings.health_port is None and restricted:
        text = "the node checks health without a token; set server.health_port"
        yield ExportFinding(("server", restricted), text)


def _reach_findings(settings: ServerSettings) -> Iterator[ExportFinding]:
    for key in _PORT_KEYS:
        if getattr(settings, key) == 0:
            yield ExportFinding(("server", key), "0 picks a free port, and a Service needs a fixed one")
    if settings.http_port is None and settings.grpc_port is None:
        text = "neither HTTP nor gRPC is served, so clients cannot connect"
        yield ExportFinding(("server", "http_port"), text)
    for key in ("host", "grpc_host", "metrics_host"):
        host = getattr(settings, key)
        with contextlib.suppress(ValueError):
            if host is None or ipaddress.ip_address(host).is_unspecified:
                continue
        text = f"{host!r} cannot be reached from outside a pod; expected 0.0.0.0 or '::'"
        yield ExportFinding(("server", key), text)


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
    yield ExportFinding(largest.path, text)


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
    yield ExportFinding((*largest.path, "resources", "cpus"), text)


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
            yield ExportFinding((*last.path, "resources", "gpu_memory_nbytes"), text)
            return  # the next GPU has the same models
