"""The options of ``gpuserve export``: values, the names that Kubernetes accepts, and checks."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

from gpuserve.config.problems import Origin, Problem, dotted
from gpuserve.model.options import option

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.yaml_document import Path


DEFAULT_NAME: Final = "gpuserve"
GPU_RESOURCE: Final = "nvidia.com/gpu"
MPS: Final = "mps"
GPU_SHARING: Final = ("", MPS, "time-slicing")
#: The default of ``max_replicas`` as a multiple of ``replicas``.
MAX_REPLICAS_FACTOR: Final = 4


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of ``gpuserve export``, from which its flags follow. Memory is in bytes."""

    # fmt: off
    image: str = option("", "Image of the server, with a tag or a digest.")
    name: str = option("", "Name of the exported objects; default that of the only model, or gpuserve.")
    namespace: str = option("", "Namespace; default the namespace of kubectl apply.")
    replicas: int = option(2, "Number of pods, at least.", least=1)
    max_replicas: int | None = option(None,
        "Number of pods, at most; default four times --replicas.", least=1)
    gpus_per_node: int | None = option(None,
        "GPUs of a node, or MIG slices; required if the config has cuda:*.", least=1)
    gpu_resource: str = option(GPU_RESOURCE, "Resource name of a GPU, such as nvidia.com/mig-1g.10gb.")
    gpu_operator: bool = option(False,
        "Run on nodes that NVIDIA's GPU operator labels only; a plain device plugin sets no labels.")
    gpu_product: str = option("", "Run on nodes with this label nvidia.com/gpu.product only.")
    min_gpu_memory_nbytes: int | None = option(None,
        "Run on nodes whose label nvidia.com/gpu.memory is at least this, such as 79Gi.")
    gpu_sharing: str = option("", "How the device plugin shares a GPU between pods: mps or time-slicing.")
    runtime_class: str = option("", "RuntimeClass of the pods, such as nvidia.")
    node_cpus: int | None = option(None,
        "Cores of a node that pods may use; the config is checked against it.", least=1)
    node_memory_nbytes: int | None = option(None,
        "Memory of a node that pods may use, such as 64Gi; the config is checked against it.")
    gpu_memory_nbytes: int | None = option(None, "Memory of a GPU; checked if gpu_memory_nbytes is set.")
    tls_secret: str = option("",
        "Secret with tls.crt and tls.key (and ca.crt), if pods use TLS and the config names no certificate.")
    prometheus: str = option("http://prometheus-operated.monitoring:9090",
        "URL of Prometheus, which KEDA queries.")
    # fmt: on

    @property
    def max_pods(self) -> int:
        """The most pods that an autoscaler may start."""
        return self.replicas * MAX_REPLICAS_FACTOR if self.max_replicas is None else self.max_replicas


#: Names end in up to 13 more characters: -config-<10 digits of a hash>, and of a pod a hash and five more.
MAX_NAME_LENGTH: Final = 45
MAX_LABEL_LENGTH: Final = 63
_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_SUBDOMAIN_LENGTH: Final = 253
LABEL_FORM: Final = (
    f"lower-case letters, digits and dashes, at most {MAX_NAME_LENGTH}, a letter first and no dash at the end"
)


def is_object_name(text: str) -> bool:
    """Return whether a Service, and every other object of an export, may have this name."""
    return len(text) <= MAX_NAME_LENGTH and _LABEL.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    return _LABEL_VALUE.fullmatch(text) is not None


def is_secret_name(text: str) -> bool:
    return len(text) <= _MAX_SUBDOMAIN_LENGTH and _SUBDOMAIN.fullmatch(text) is not None


def is_resource_name(text: str) -> bool:
    """Return whether devices may have this resource name: a domain, and a name in it."""
    domain, _, name = text.partition("/")
    return is_secret_name(domain) and "." in domain and is_label_value(name)


def model_names(configuration: Configuration) -> list[str]:
    """Return the name of every model, once for all its versions."""
    return list(dict.fromkeys(model.name for model in configuration.models))


def export_name(configuration: Configuration, options: ExportOptions) -> str:
    """Return ``--name``, or the name of the only model, or the default."""
    names = model_names(configuration)
    return options.name or (names[0] if len(names) == 1 else DEFAULT_NAME)


#: A problem: the path of a key in the file, or a flag, and what is wrong.
ExportFinding: TypeAlias = "tuple[Path | str, str]"


def problems_of(configuration: Configuration, found: Iterable[ExportFinding]) -> list[Problem]:
    """Return the problems of findings, with their places in the file."""
    return [
        Problem(where, text, Origin.FLAG)
        if isinstance(where, str)
        else configuration.sources.problem(where, f"{dotted(where)}: {text}")
        for where, text in found
    ]


#: [host[:port]/]path:tag, path@sha256:…, or both; a host differs from a path by a dot, a port, or its name.
_IMAGE: Final = re.compile(
    r"(?:(?:localhost|[a-zA-Z0-9-]+(?:\.[a-zA-Z0-9-]+)+|[a-zA-Z0-9-]+(?=:))(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
#: The name of a repository has at most 255 characters, a tag 128; a digest of this kind has 71.
_MAX_IMAGE_LENGTH: Final = 255 + 1 + 128 + 1 + 71
_MAX_SHOWN: Final = 140
#: Pod counts are signed 32-bit integers.
MAX_POD_COUNT: Final = (1 << 31) - 1
#: More than any machine has, whole or in slices; the limit bounds a list of them.
_MAX_GPUS: Final = 1024
_WEB_SCHEMES: Final = frozenset({"http", "https"})
#: A DNS name; Services may have underscores.
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")


def option_violations(options: ExportOptions) -> Iterator[ExportFinding]:
    yield from image_findings(options.image)
    yield from _number_findings(options)
    if not is_resource_name(options.gpu_resource):
        form = "expected the resource name of a device plugin, such as nvidia.com/gpu"
        yield "--gpu-resource", f"{form}, given {quoted(options.gpu_resource)}"
    if options.runtime_class and not is_secret_name(options.runtime_class):
        text = f"{quoted(options.runtime_class)} is not a valid name of a RuntimeClass"
        yield "--runtime-class", text
    if options.gpu_product and not is_label_value(options.gpu_product):
        form = "expected the value of a node's label nvidia.com/gpu.product, such as NVIDIA-H100-80GB-HBM3"
        yield "--gpu-product", f"{form}, given {quoted(options.gpu_product)}"
    if options.gpu_sharing not in GPU_SHARING:
        form = f"expected {' or '.join(GPU_SHARING[1:])}"
        yield "--gpu-sharing", f"{form}, given {quoted(options.gpu_sharing)}"
    if options.tls_secret and not is_secret_name(options.tls_secret):
        yield "--tls-secret", f"{quoted(options.tls_secret)} is not a valid name of a Secret"
    if not _is_web_address(options.prometheus):
        form = "expected an address such as http://prometheus.monitoring:9090"
        yield "--prometheus", f"{form}, given {quoted(options.prometheus)}"


def namespace_violations(options: ExportOptions) -> Iterator[ExportFinding]:
    """Yield problems of the namespace, also for exports that start no pod."""
    is_label = len(options.namespace) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(options.namespace)
    if options.namespace and not is_label:
        yield "--namespace", f"{quoted(options.namespace)} is not a valid name of a namespace"


def host_violations(host: str) -> Iterator[ExportFinding]:
    """Yield problems of a host name; "" is the cluster's own."""
    if host and not _HOST.fullmatch(host):
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return
        form = "expected a name or an address without a port, such as models.example"
        yield "--host", f"{form}, given {quoted(host)}"


def quoted(text: str) -> str:
    """Return the text in quotes, shortened if it is long."""
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")


def image_findings(image: str) -> Iterator[ExportFinding]:
    form = "expected one with a tag or a digest, such as registry.example/gpuserve:1.2"
    if not image:
        text = f"missing: a pod runs an image, and no key of the config names it; {form}"
        yield "--image", text
        return
    found = _IMAGE.fullmatch(image) if len(image) <= _MAX_IMAGE_LENGTH else None
    if found is None or not (found["tag"] or found["digest"]):
        yield "--image", f"{form}, given {quoted(image)}"
    elif found["tag"] == "latest" and not found["digest"]:
        text = "the tag 'latest' changes its image, so a rollback would get the same one; use a version"
        yield "--image", text


def _number_findings(options: ExportOptions) -> Iterator[ExportFinding]:
    if options.replicas > MAX_POD_COUNT:
        yield "--replicas", f"expected at most {MAX_POD_COUNT}, given {options.replicas}"
    elif options.max_pods > MAX_POD_COUNT:
        yield "--max-replicas", f"expected at most {MAX_POD_COUNT}, given {options.max_pods}"
    elif options.max_pods < options.replicas:
        text = f"expected at least --replicas {options.replicas}, given {options.max_pods}"
        yield "--max-replicas", text
    if options.gpus_per_node is not None and options.gpus_per_node > _MAX_GPUS:
        yield "--gpus-per-node", f"expected at most {_MAX_GPUS}, given {options.gpus_per_node}"


def _is_web_address(text: str) -> bool:
    if re.search(r"[\s\"'`<>\\]", text):
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in _WEB_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a malformed port
        return False
