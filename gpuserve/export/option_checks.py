"""What of the command line no cluster takes. Each finding says what was expected, and what was given."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from gpuserve.export.findings import Finding, of_flag
from gpuserve.export.names import is_namespace, is_resource_name, is_secret_name
from gpuserve.export.options import ExportOptions

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
    """Everything that is wrong with what was given beside the config file."""
    yield from _image(options.image)
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
    """Of those exports too that start no pod."""
    if options.namespace and not is_namespace(options.namespace):
        yield of_flag("--namespace", f"{shown(options.namespace)} is no name of a namespace")


def host_violations(host: str) -> Iterator[Finding]:
    """Of a name with an address for each pod; "" is the one that the cluster has."""
    if host and not _HOST.fullmatch(host) and not _is_address(host):
        form = "expected a name or an address without a port, such as models.example"
        yield of_flag("--host", f"{form}, given {shown(host)}")


def shown(text: str) -> str:
    """What was given, in quotes, and not all of it where it is long."""
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")


def _image(image: str) -> Iterator[Finding]:
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
