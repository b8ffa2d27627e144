"""What an Envoy is to be, as plain values. ``of`` makes it of a config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from gpuserve.config.settings.server import all_access_rules
from gpuserve.export.manifests.pod import TLS_FOLDER
from gpuserve.export.sizing.options import export_name
from gpuserve.export.sizing.ports import GRPC, HEALTH, HTTP, ServerPorts
from gpuserve.export.sizing.sizing import batch_nbytes
from gpuserve.export.sizing.values import KIB, MIB, Reasoned, readable, up_to

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.settings.server import ServerSettings
    from gpuserve.export.sizing.options import ExportOptions

#: Where Envoy's own files are in its pod.
FOLDER: Final = "/etc/envoy"
ADMIN_PORT: Final = 9901
STATUS_PORT: Final = 9902
#: Of Envoy's process; the container may have as much more as its code and threads take.
HEAP_NBYTES: Final = 1792 * MIB
_LEAST_REPEATED_NBYTES: Final = 1 * MIB
_MOST_REPEATED_NBYTES: Final = 64 * MIB
#: Where shapes are free: assumed.
_FREE_REPEATED_NBYTES: Final = 16 * MIB
#: Of a request besides its tensors.
_ENVELOPE_NBYTES: Final = 64 * KIB


@dataclass(frozen=True, slots=True)
class Proxy:
    """The pods are behind ``host``, or in a file of ``endpoints_folder`` per cluster, ``CLUSTER.yaml``."""

    name: str
    #: Of the pods.
    ports: ServerPorts
    #: Of Envoy, by the name of the pods' port that is behind it.
    listen_ports: dict[str, int]
    repeated: Reasoned
    #: Whether inference may run again where a pod or a worker was lost with it.
    runs_again: bool = True
    host: str = ""
    endpoints_folder: str = ""
    address: str = "0.0.0.0"
    #: Only for this machine; None is none.
    admin_port: int | None = ADMIN_PORT
    status_port: int | None = STATUS_PORT
    tls_folder: str = TLS_FOLDER
    #: Where Envoy finds its files.
    folder: str = FOLDER
    asks_clients_for_certificates: bool = False
    #: Opens the health endpoints, where they want a token.
    health_token: str | None = None

    @classmethod
    def of(cls, configuration: Configuration, options: ExportOptions, host: str = "") -> Self:
        """For pods of ``export kubernetes`` with this config. ``host`` "": their Service."""
        settings, name = configuration.settings, export_name(configuration, options)
        ports = ServerPorts.of(settings, options)
        return cls(
            name=name,
            ports=ports,
            listen_ports={one: ports.numbers[one] for one in (HTTP, GRPC) if one in ports.numbers},
            repeated=_repeated(configuration),
            runs_again=all(model.retry_on_worker_death for model in configuration.entries.models),
            host=host or headless_service(name, options.namespace, ports),
            address="::" if ":" in settings.host else "0.0.0.0",
            asks_clients_for_certificates=bool(settings.tls_client_ca),
            health_token=None if HEALTH in ports.numbers else _health_token(settings),
        )

    @property
    def clusters(self) -> list[str]:
        """The ports of the pods that requests go to."""
        return list(self.listen_ports)


def headless_service(name: str, namespace: str, ports: ServerPorts) -> str:
    """The Service of ``export kubernetes`` whose name has an address for each pod that is ready."""
    service = f"{name}-{GRPC}" if GRPC in ports.numbers else f"{name}-metrics"
    return f"{service}.{namespace}" if namespace else service


def _health_token(settings: ServerSettings) -> str | None:
    return next((rule.token for rule in all_access_rules(settings) if "health" in rule.groups), None)


def _repeated(configuration: Configuration) -> Reasoned:
    """Up to which size Envoy keeps a request, to send it again."""
    sizes = [batch_nbytes(model, model.inputs) for model in configuration.models]
    if None in sizes:
        nbytes = max(_FREE_REPEATED_NBYTES, _within_limits(sizes))
        why = f"Shapes are free, so {readable(nbytes)} is assumed."
    else:
        nbytes = _within_limits(sizes)
        why = f"Up to {readable(nbytes)}: the largest request of a model, within 1 and 64 MiB."
    return Reasoned(
        nbytes,
        f"{why} A request is kept until its answer begins, and sent again from there. A larger one passes "
        "through all the same, but is lost with the pod that has it.",
    )


def _within_limits(sizes: Iterable[int | None]) -> int:
    largest = max((size for size in sizes if size is not None), default=0)
    nbytes = up_to(largest + _ENVELOPE_NBYTES, MIB)
    return min(max(nbytes, _LEAST_REPEATED_NBYTES), _MOST_REPEATED_NBYTES)
