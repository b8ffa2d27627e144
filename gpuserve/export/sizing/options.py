"""The options of ``gpuserve export``: their values, the names that Kubernetes takes, and what can be wrong. A
``Finding`` is one thing that is wrong with the config or an option, before it knows where its key stands.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from gpuserve.config.problems import Origin, Problem, dotted

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.yaml_document import Path

DEFAULT_NAME: Final = "gpuserve"
GPU_RESOURCE: Final = "nvidia.com/gpu"
PROMETHEUS: Final = "http://prometheus-operated.monitoring:9090"
DEFAULT_REPLICAS: Final = 2
#: Where there is no word of it, so many times as many pods as ``replicas`` at most.
GROWTH: Final = 4


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options. ``name`` "" is the only model's, or ``gpuserve``; what is None is not checked."""

    image: str = ""
    name: str = ""
    namespace: str = ""
    replicas: int = DEFAULT_REPLICAS
    max_replicas: int | None = None
    gpus_per_node: int | None = None
    #: What the device plugin calls a GPU, or a MIG slice: nvidia.com/gpu, nvidia.com/mig-1g.10gb.
    gpu_resource: str = GPU_RESOURCE
    node_cpus: int | None = None
    node_memory_nbytes: int | None = None
    gpu_memory_nbytes: int | None = None
    #: The Secret with tls.crt and tls.key (and ca.crt), where the config file names no certificate.
    tls_secret: str = ""
    prometheus: str = PROMETHEUS

    @property
    def most_replicas(self) -> int:
        """How many pods an autoscaler may start."""
        return self.replicas * GROWTH if self.max_replicas is None else self.max_replicas


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
    """Whether a Service, and all else of an export, may have this name."""
    return len(text) <= MAX_NAME_LENGTH and _LABEL.fullmatch(text) is not None


def is_namespace(text: str) -> bool:
    return len(text) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    return _LABEL_VALUE.fullmatch(text) is not None


def is_secret_name(text: str) -> bool:
    return len(text) <= _MAX_SUBDOMAIN_LENGTH and _SUBDOMAIN.fullmatch(text) is not None


def is_resource_name(text: str) -> bool:
    """Whether devices may be called this: a domain, and a name in it."""
    domain, _, name = text.partition("/")
    return is_secret_name(domain) and "." in domain and is_label_value(name)


def model_names(configuration: Configuration) -> list[str]:
    """The name of every model, once for all its versions."""
    return list(dict.fromkeys(model.name for model in configuration.models))


def export_name(configuration: Configuration, options: ExportOptions) -> str:
    """``--name``, or the name of the only model, or the default."""
    names = model_names(configuration)
    return options.name or (names[0] if len(names) == 1 else DEFAULT_NAME)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with the key at ``path``, or with a ``flag`` of the command line."""

    path: Path
    text: str
    flag: str = ""


def of_flag(flag: str, text: str) -> Finding:
    return Finding((), text, flag)


def problems(configuration: Configuration, found: Iterator[Finding]) -> list[Problem]:
    """The problems that findings stand for, with their places in the file."""
    return [
        Problem(one.flag, one.text, Origin.FLAG)
        if one.flag
        else configuration.sources.problem(one.path, f"{dotted(one.path)}: {one.text}")
        for one in found
    ]


#: [host[:port]/]path:tag, path@sha256:…, or both; a host is told from a path by its dot, its port, its name.
_IMAGE: Final = re.compile(
    r"(?:(?:localhost|[a-zA-Z0-9-]+(?:\.[a-zA-Z0-9-]+)+|[a-zA-Z0-9-]+(?=:))(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
#: The name of a repository has at most 255 characters, a tag 128; a digest of this kind has 71.
_MAX_IMAGE_LENGTH: Final = 255 + 1 + 128 + 1 + 71
_MAX_SHOWN: Final = 140
#: Numbers of pods have 32 bits with a sign.
MAX_PODS: Final = (1 << 31) - 1
#: No machine has so many, cut into slices or not; a list of them is made.
_MAX_GPUS: Final = 1024
_WEB: Final = frozenset({"http", "https"})
#: Of a name server: Services have underscores as well.
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")


def option_violations(options: ExportOptions) -> Iterator[Finding]:
    yield from image_findings(options.image)
    yield from _numbers(options)
    if not is_resource_name(options.gpu_resource):
        form = "expected what a device plugin calls its devices, such as nvidia.com/gpu"
        yield of_flag("--gpu-resource", f"{form}, given {shown(options.gpu_resource)}")
    if options.tls_secret and not is_secret_name(options.tls_secret):
        yield of_flag("--tls-secret", f"{shown(options.tls_secret)} is no name of a Secret")
    if not _is_web_address(options.prometheus):
        form = "expected an address such as http://prometheus.monitoring:9090"
        yield of_flag("--prometheus", f"{form}, given {shown(options.prometheus)}")


def namespace_violations(options: ExportOptions) -> Iterator[Finding]:
    """Problems of the namespace, also for exports that start no pod."""
    if options.namespace and not is_namespace(options.namespace):
        yield of_flag("--namespace", f"{shown(options.namespace)} is no name of a namespace")


def host_violations(host: str) -> Iterator[Finding]:
    """Problems of a host name; "" is the one that the cluster has."""
    if host and not _HOST.fullmatch(host) and not _is_address(host):
        form = "expected a name or an address without a port, such as models.example"
        yield of_flag("--host", f"{form}, given {shown(host)}")


def shown(text: str) -> str:
    """The given text in quotes, shortened where it is long."""
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")


def image_findings(image: str) -> Iterator[Finding]:
    form = "expected one with a tag or a digest, such as registry.example/gpuserve:1.2"
    if not image:
        yield of_flag("--image", f"missing: a pod runs an image, and no key of the config names it; {form}")
        return
    found = _IMAGE.fullmatch(image) if len(image) <= _MAX_IMAGE_LENGTH else None
    if found is None or not (found["tag"] or found["digest"]):
        yield of_flag("--image", f"{form}, given {shown(image)}")
    elif found["tag"] == "latest" and not found["digest"]:
        text = "the tag 'latest' is another image tomorrow, and a rollback finds the same; give it a version"
        yield of_flag("--image", text)


def _numbers(options: ExportOptions) -> Iterator[Finding]:
    if options.replicas > MAX_PODS:
        yield of_flag("--replicas", f"expected at most {MAX_PODS}, given {options.replicas}")
    elif options.most_replicas > MAX_PODS:
        yield of_flag("--max-replicas", f"expected at most {MAX_PODS}, given {options.most_replicas}")
    elif options.most_replicas < options.replicas:
        text = f"expected at least --replicas {options.replicas}, given {options.most_replicas}"
        yield of_flag("--max-replicas", text)
    if options.gpus_per_node is not None and options.gpus_per_node > _MAX_GPUS:
        yield of_flag("--gpus-per-node", f"expected at most {_MAX_GPUS}, given {options.gpus_per_node}")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_web_address(text: str) -> bool:
    if re.search(r"[\s\"'`<>\\]", text):
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in _WEB and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False
