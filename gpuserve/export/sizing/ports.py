"""The ports of a pod: which there are, which speak TLS, and which the node asks for health."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from gpuserve.config.settings.server import ServerSettings
    from gpuserve.export.sizing.options import ExportOptions

GRPC: Final = "grpc"
HTTP: Final = "http"
METRICS: Final = "metrics"
HEALTH: Final = "health"


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """Numbers by name, in the order in which a pod lists them, and the names of those that speak TLS."""

    numbers: dict[str, int]
    tls: frozenset[str]

    @classmethod
    def of(cls, settings: ServerSettings, options: ExportOptions) -> Self:
        """The ports of a server in a pod, where TLS may come with a Secret."""
        named = {
            GRPC: settings.grpc_port,
            HTTP: settings.http_port,
            METRICS: settings.metrics_port,
            HEALTH: settings.health_port,
        }
        numbers = {name: port for name, port in named.items() if port is not None}
        has_tls = bool(settings.tls_certfile or options.tls_secret)
        return cls(numbers, frozenset(settings.tls_ports) & numbers.keys() if has_tls else frozenset())

    def app_protocol(self, name: str) -> str:
        """The ``appProtocol`` of a port, for meshes and gateways."""
        if name in self.tls:
            return "https"
        return "kubernetes.io/h2c" if name == GRPC else "http"


def probe_port(ports: ServerPorts) -> str | None:
    """The port that a node asks: for health, or one without TLS, which a node cannot speak to gRPC."""
    asked = [HEALTH, *ports.numbers] if HEALTH in ports.numbers else ports.numbers
    return next((name for name in asked if name not in ports.tls), None)
