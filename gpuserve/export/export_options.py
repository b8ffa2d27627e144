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

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.yaml_document import Path


DEFAULT_NAME: Final = "gpuserve"
GPU_RESOURCE: Final = "nvidia.com/gpu"
MPS: Final = "mps"
GPU_SHARING: Final = ("", MPS, "time-slicing")
PROMETHEUS: Final = "http://prometheus-operated.monitoring:9090"
DEFAULT_REPLICAS: Final = 2
#: The default of ``max_replicas`` as a multiple of ``replicas``.
MAX_REPLICAS_FACTOR: Final = 4


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options. ``name`` "" is the only model's name, or ``gpuserve``; None is not checked."""

    image: str = ""
    name: str = ""
    namespace: str = ""
    replicas: int = DEFAULT_REPLICAS
    max_replicas: int | None = None
    gpus_per_node: int | None = None
    #: Resource name of a GPU or a MIG slice: nvidia.com/gpu, nvidia.com/mig-1g.10gb.
    gpu_resource: str = GPU_RESOURCE
    #: Whether nodes have the labels of NVIDIA's GPU operator.
    gpu_operator: bool = False
    gpu_product: str = ""
    min_gpu_memory_nbytes: int | None = None
    #: How the device plugin shares GPUs between pods: "", "mps" or "time-slicing".
    gpu_sharing: str = ""
    runtime_class: str = ""
    node_cpus: int | None = None
    node_memory_nbytes: int | None = None
    gpu_memory_nbytes: int | None = None
    #: The Secret with tls.crt and tls.key (and ca.crt), if the config file names no certificate.
    tls_secret: str = ""
    prometheus: str = PROMETHEUS

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
