"""What of a configuration, or of a flag, cannot run in a cluster. Each problem names the key, and where it
stands in the file.

``violations`` are about what is written, and come before anything is computed; ``fit_violations`` are about
the computed sizes and the node.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuserve.config.messages import Origin, Problem
from gpuserve.devices.names import EVERY_GPU, is_uuid, number_of
from gpuserve.export.names import (
    LABEL_FORM,
    export_name,
    is_label_value,
    is_namespace,
    is_object_name,
    model_names,
)
from gpuserve.export.options import GPU_RESOURCE
from gpuserve.export.ports import ServerPorts, probe_port
from gpuserve.export.quantities import readable
from gpuserve.export.reservation import InstanceGroup, gpu_memory

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.positions import Path
    from gpuserve.export.options import ExportOptions
    from gpuserve.export.sizing import Sizes
    from gpuserve.settings import ServerSettings

#: host[:port]/path:tag or @sha256:…; what a registry would refuse anyway is not looked for.
_IMAGE: Final = re.compile(
    r"[a-z0-9][a-zA-Z0-9._:/-]*?(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})|@sha256:[0-9a-f]{64})"
)
_PORT_KEYS: Final = ("http_port", "grpc_port", "metrics_port", "health_port")
_WRITABLE: Final = ("/tmp/", "/dev/")


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem before it knows where its key stands. ``flag``: the command line is to blame, not a key."""

    path: Path
    text: str
    flag: str = ""


def problems(configuration: Configuration, found: Iterator[Finding]) -> list[Problem]:
    """The findings, each with its place."""
    return [
        Problem(one.flag, one.text, Origin.FLAG)
        if one.flag
        else configuration.sources.problem(one.path, one.text)
        for one in found
    ]


def monitoring_violations(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    """For exports that start no pod: alerts and dashboards."""
    yield from _name(configuration, options)
    if configuration.settings.metrics_port is None:
        text = "server.metrics_port: null switches off the metrics page, which an export needs"
        yield Finding(("server", "metrics_port"), text)


def violations(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    """Everything that is wrong before sizes are computed."""
    yield from _image(options.image)
    yield from _replicas(options)
    yield from monitoring_violations(configuration, options)
    yield from _label_values(configuration)
    yield from _network(configuration, options)
    yield from _devices(configuration, options)
    yield from _trace_file(configuration)


def fit_violations(
    configuration: Configuration, options: ExportOptions, computed: Sizes, groups: list[InstanceGroup]
) -> Iterator[Finding]:
    """What does not fit a node of this kind."""
    yield from _node_memory(options, computed)
    yield from _gpu_memory(configuration, options, groups)


def _image(image: str) -> Iterator[Finding]:
    form = "expected one with a tag or a digest, such as registry.example/gpuserve:1.2"
    if not image:
        yield Finding(
            (), f"missing: a pod runs an image, and no key of the config names it; {form}", "--image"
        )
        return
    found = _IMAGE.fullmatch(image)
    if found is None:
        yield Finding((), f"{form}, given {image!r}", "--image")
    elif found["tag"] == "latest":
        text = "the tag 'latest' is another image tomorrow, and a rollback finds the same; give it a version"
        yield Finding((), text, "--image")


def _replicas(options: ExportOptions) -> Iterator[Finding]:
    if options.most_replicas < options.replicas:
        text = f"expected at least --replicas {options.replicas}, given {options.most_replicas}"
        yield Finding((), text, "--max-replicas")


def _name(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    if options.namespace and not is_namespace(options.namespace):
        yield Finding((), f"{options.namespace!r} is no name of a namespace", "--namespace")
    name = export_name(configuration, options)
    if is_object_name(name):
        return
    if options.name:
        yield Finding((), f"{name!r} is no DNS label: {LABEL_FORM}", "--name")
        return
    text = (
        f"models[0].name: the objects of the cluster would be called {name!r}, which is no DNS label "
        f"({LABEL_FORM}); give them a name with --name"
    )
    yield Finding(("models", 0, "name"), text)


def _label_values(configuration: Configuration) -> Iterator[Finding]:
    names = [model.name for model in configuration.models]
    for name in model_names(configuration):
        if not is_label_value(name):
            index = names.index(name)
            text = (
                f"models[{index}].name: {name[:140]!r} cannot be the value of a label, by which the "
                "autoscaler finds its metrics: at most 63 characters, a letter or digit first and last"
            )
            yield Finding(("models", index, "name"), text)


def _network(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    settings = configuration.settings
    for key in _PORT_KEYS:
        if getattr(settings, key) == 0:
            text = f"server.{key}: 0 picks a free port, and a Service needs a fixed one"
            yield Finding(("server", key), text)
    if settings.http_port is None and settings.grpc_port is None:
        yield Finding(
            ("server", "http_port"), "server.http_port: neither HTTP nor gRPC is served; nobody could ask"
        )
    elif probe_port(ServerPorts.of(settings, options)) is None:
        text = (
            "server.tls_ports: the node asks for health without TLS, and every port speaks TLS; give a "
            "server.health_port"
        )
        yield Finding(("server", "tls_ports"), text)
    if settings.health_port is None and (key := _health_restriction(settings)):
        text = f"server.{key}: the node asks for health without a token; give a server.health_port"
        yield Finding(("server", key), text)
    if _is_loopback(settings.host):
        text = f"server.host: {settings.host!r} is not reached from outside a pod; expected 0.0.0.0 or '::'"
        yield Finding(("server", "host"), text)


def _health_restriction(settings: ServerSettings) -> str:
    """The key that closes the health endpoints; "" where they are open."""
    if "health" in settings.restricted_endpoints:
        return "restricted_endpoints"
    return "access_rules" if any("health" in rule.groups for rule in settings.access_rules) else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _devices(configuration: Configuration, options: ExportOptions) -> Iterator[Finding]:
    for index, model in enumerate(configuration.entries.models):
        for position, entry in enumerate(model.instances if model.ensemble is None else ()):
            path: Path = ("models", index, "instances", position, "device")
            text = _device_problem(entry.device, options)
            if text:
                yield Finding(path, f"models[{index}].instances[{position}].device: {text}")


def _device_problem(device: str, options: ExportOptions) -> str:
    """Why no pod can have this device; "" where one can."""
    if is_uuid(device):
        slices = (
            f"; for MIG slices also --gpu-resource {'nvidia.com/mig-1g.10gb'}" if device[0] == "M" else ""
        )
        return f"{device!r} is one GPU of one machine, and a pod runs on any: write cuda:0{slices}"
    if device == EVERY_GPU and options.gpus_per_node is None:
        return "how many GPUs 'cuda:*' stands for depends on the node: give --gpus-per-node"
    number, there_are = number_of(device), options.gpus_per_node
    if number is not None and there_are is not None and number >= there_are:
        return f"{device!r} needs {number + 1} GPUs, and a node has {there_are} (--gpus-per-node)"
    return ""


def _trace_file(configuration: Configuration) -> Iterator[Finding]:
    file = configuration.settings.trace.file
    if file.startswith("/") and not file.startswith(_WRITABLE):
        text = (
            f"server.trace.file: {file!r} cannot be written in a pod, its root is read only; write into /tmp"
        )
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
