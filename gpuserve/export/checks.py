"""What of a configuration, or of a flag, cannot run in a cluster, with the key and its place in the file.
``violations`` come before anything is computed; ``fit_violations`` are about computed sizes and the node.
"""

from __future__ import annotations

import ipaddress
import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from gpuserve.devices.names import EVERY_GPU, is_uuid, number_of
from gpuserve.export.manifests.pod import WORKING_FOLDER
from gpuserve.export.sizing.options import (
    GPU_RESOURCE,
    LABEL_FORM,
    Finding,
    export_name,
    host_violations,
    image_findings,
    is_label_value,
    is_object_name,
    model_names,
    namespace_violations,
    of_flag,
    option_violations,
    shown,
)
from gpuserve.export.sizing.ports import ServerPorts, probe_port
from gpuserve.export.sizing.sizing import InstanceGroup, gpu_memory
from gpuserve.export.sizing.values import readable

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.settings.server import ServerSettings
    from gpuserve.export.sizing.options import ExportOptions
    from gpuserve.export.sizing.sizing import Sizes

_PORT_KEYS: Final = ("http_port", "grpc_port", "metrics_port", "health_port")
_TIME_KEYS: Final = ("lame_duck_s", "drain_timeout_s", "load_timeout_s")
#: Grace periods and counts of probes have 32 bits with a sign, and some of these are added up.
_LONGEST_S: Final = 500_000_000
_WRITABLE: Final = ("/tmp/", "/dev/")  # nosec B108


def monitoring_violations(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    """For exports that start no pod: alerts and dashboards."""
    yield from _name(configuration, options)
    if configuration.settings.metrics_port is None:
        yield Finding(("server", "metrics_port"), "null switches off the metrics page, which an export needs")


def compose_violations(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    """For one server in a container, watched by its metrics page and asked for its health over HTTP."""
    yield from monitoring_violations(configuration, options)
    yield from image_findings(options.image)
    if configuration.settings.http_port is None:
        yield Finding(("server", "http_port"), "null switches off HTTP, by which a container is asked")
    yield from _reach(configuration.settings)


def balancer_violations(
    configuration: Configuration, options: ExportOptions, host: str = ""
) -> Iterator[Finding]:
    """For what stands in front of the pods, and starts none."""
    yield from host_violations(host)
    yield from _name(configuration, options)
    yield from _reach(configuration.settings)


def violations(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    """Everything that is wrong before sizes are computed."""
    yield from option_violations(options)
    yield from monitoring_violations(configuration, options)
    yield from _label_values(configuration)
    yield from _network(configuration, options)
    yield from _times(configuration.settings)
    yield from _devices(configuration, options)
    yield from _trace_file(configuration)


def fit_violations(
    configuration: Configuration, options: ExportOptions, computed: Sizes, groups: list[InstanceGroup]
) -> Iterator[Finding]:
    """What does not fit a node of this kind."""
    yield from _node_memory(options, computed)
    yield from _node_cpus(options, computed, groups)
    yield from _gpu_memory(configuration, options, groups)


def _name(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    yield from namespace_violations(options)
    name = export_name(configuration, options)
    if is_object_name(name):
        return
    if options.name:
        yield of_flag("--name", f"{shown(name)} is no DNS label: {LABEL_FORM}")
        return
    text = f"the objects of the cluster would be called {shown(name)}, which is no DNS label ({LABEL_FORM})"
    yield Finding(("models", 0, "name"), f"{text}; give them a name with --name")


def _label_values(configuration: Configuration) -> Iterator[Finding]:
    names = [model.name for model in configuration.models]
    for name in model_names(configuration):
        if not is_label_value(name):
            text = (
                f"{shown(name)} cannot be the value of a label, by which the autoscaler finds its metrics: "
                "at most 63 characters, a letter or digit first and last"
            )
            yield Finding(("models", names.index(name), "name"), text)


def _network(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    settings = configuration.settings
    yield from _reach(settings)
    is_served = settings.http_port is not None or settings.grpc_port is not None
    if is_served and probe_port(ServerPorts.of(settings, options)) is None:
        text = "the node asks for health without TLS, and every port speaks TLS; give a server.health_port"
        yield Finding(("server", "tls_ports"), text)
    if settings.health_port is None and (key := _health_restriction(settings)):
        text = "the node asks for health without a token; give a server.health_port"
        yield Finding(("server", key), text)


def _reach(settings: ServerSettings) -> Iterator[Finding]:
    for key in _PORT_KEYS:
        if getattr(settings, key) == 0:
            yield Finding(("server", key), "0 picks a free port, and a Service needs a fixed one")
    if settings.http_port is None and settings.grpc_port is None:
        yield Finding(("server", "http_port"), "neither HTTP nor gRPC is served; nobody could ask")
    for key in ("host", "grpc_host", "metrics_host"):
        host = getattr(settings, key)
        if host is not None and not _is_every_address(host):
            text = f"{host!r} is not reached from outside a pod; expected 0.0.0.0 or '::'"
            yield Finding(("server", key), text)


def _health_restriction(settings: ServerSettings) -> str:
    """The key that closes the health endpoints; "" where they are open."""
    if "health" in settings.restricted_endpoints:
        return "restricted_endpoints"
    return "access_rules" if any("health" in rule.groups for rule in settings.access_rules) else ""


def _is_every_address(host: str) -> bool:
    """Whether a server listens on whatever address its pod is given."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _times(settings: ServerSettings) -> Iterator[Finding]:
    for key in _TIME_KEYS:
        given = getattr(settings, key)
        if given is not None and given > _LONGEST_S:
            text = f"a pod can be given at most {_LONGEST_S} s of it, and this is {given:g}"
            yield Finding(("server", key), text)


def _devices(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    for index, model in enumerate(configuration.entries.models):
        for position, entry in enumerate(model.instances if model.ensemble is None else ()):
            if text := _device_problem(entry.device, options):
                yield Finding(("models", index, "instances", position, "device"), text)


def _device_problem(device: str, options: ExportOptions) -> str:
    """Why no pod can have this device; "" where one can."""
    if is_uuid(device):
        slices = "; for MIG slices also --gpu-resource nvidia.com/mig-1g.10gb" if device[0] == "M" else ""
        return f"{device!r} is one GPU of one machine, and a pod runs on any: write cuda:0{slices}"
    if device == EVERY_GPU and options.gpus_per_node is None:
        return "how many GPUs 'cuda:*' stands for depends on the node: give --gpus-per-node"
    number, there_are = number_of(device), options.gpus_per_node
    if number is not None and there_are is not None and number >= there_are:
        return f"{device!r} needs {number + 1} GPUs, and a node has {there_are} (--gpus-per-node)"
    return ""


def _trace_file(configuration: Configuration) -> Iterator[Finding]:
    file = configuration.settings.trace.file
    if file and not posixpath.normpath(posixpath.join(WORKING_FOLDER, file)).startswith(_WRITABLE):
        text = f"{file!r} cannot be written in a pod, its root is read only; write into /tmp"
        yield Finding(("server", "trace", "file"), text)


def _node_memory(options: ExportOptions, computed: Sizes) -> Iterator[Finding]:
    there_is = options.node_memory_nbytes
    if there_is is None or computed.memory_nbytes <= there_is:
        return
    largest = max(computed.parts, key=lambda part: part.nbytes)
    text = (
        f"a pod may take {readable(computed.memory_nbytes)} of memory, and a node has {readable(there_is)} "
        f"(--node-memory): {readable(largest.nbytes)} of it is {largest.name}"
    )
    yield Finding(largest.path, text)


def _node_cpus(options: ExportOptions, computed: Sizes, groups: list[InstanceGroup]) -> Iterator[Finding]:
    if options.node_cpus is None or computed.cpus.value <= options.node_cpus:
        return
    largest = max(groups, key=lambda group: group.processes * group.resources.cpus)
    text = (
        f"a pod takes {computed.cpus.value} cores, and a node has {options.node_cpus} (--node-cpus): "
        f"{largest.processes} x {largest.resources.cpus} of them are of these instances"
    )
    yield Finding((*largest.path, "resources", "cpus"), text)


def _gpu_memory(
    configuration: Configuration, options: ExportOptions, groups: list[InstanceGroup]
) -> Iterator[Finding]:
    if options.gpu_memory_nbytes is None:
        return
    for number, taken in sorted(gpu_memory(groups).items()):
        total = sum(nbytes for _, nbytes in taken)
        if total > options.gpu_memory_nbytes:
            last = taken[-1][0]
            names = ", ".join(
                f"{configuration.models[group.model].name} {readable(nbytes)}" for group, nbytes in taken
            )
            what = "a slice" if options.gpu_resource != GPU_RESOURCE else "a GPU"
            text = (
                f"cuda:{number} would hold {readable(total)} ({names}), and {what} has "
                f"{readable(options.gpu_memory_nbytes)} (--gpu-memory)"
            )
            yield Finding((*last.path, "resources", "gpu_memory_nbytes"), text)
            return  # the next GPU has the same models
