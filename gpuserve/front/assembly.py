"""The endpoint of a front put together: from the settings to doors behind their guards, and to transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuserve.access import all_rules
from gpuserve.front.endpoint.asgi import Application, Doors
from gpuserve.front.endpoint.disconnects import DisconnectWatch
from gpuserve.front.endpoint.forwarding import HeaderForwarding, forwarding
from gpuserve.front.endpoint.grpc_asgi import GrpcDoor
from gpuserve.front.endpoint.grpc_compression import CompressedInference
from gpuserve.front.endpoint.guards import GrpcGuard, HttpGuard
from gpuserve.front.endpoint.http import HttpDoor
from gpuserve.front.endpoint.restrictions import Policy, token_headers
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.transport import H2cornTransport
from gpuserve.settings import NO_COMPRESSION, ServerSettings
from gpuserve.tls import TlsFiles, tls_files

if TYPE_CHECKING:
    from gpuserve.front.endpoint.grpc_aio import GrpcAioTransport


def doors(service: InferenceService, settings: ServerSettings, metrics_port: int | None) -> Doors:
    """Both doors, each behind its guard; ``metrics_port`` is the one that answers with metrics alone."""
    watch, most, policy = DisconnectWatch(), settings.max_request_nbytes, _policy(settings)
    http = HttpDoor(service, watch, most, _forwarding(settings, settings.http_header_forward_pattern))
    grpc: Application = GrpcDoor(
        service, watch, most, _forwarding(settings, settings.grpc_header_forward_pattern)
    )
    if settings.grpc_response_compression != NO_COMPRESSION:
        grpc = CompressedInference(grpc, settings.grpc_response_compression)
    return Doors(GrpcGuard(grpc, policy), HttpGuard(http, policy), http.metrics_only, metrics_port)


def h2corn_transports(
    application: Application, settings: ServerSettings, listeners: Mapping[str, int]
) -> list[H2cornTransport]:
    """h2corn on the listeners, descriptors by role: one server for those with TLS, one for the others."""
    found = []
    for tls in (tls_files(settings), None):
        fds = [fd for role, fd in listeners.items() if _tls_on(settings, role) == tls]
        if fds:
            found.append(H2cornTransport(application, fds, settings.log_format, tls))
        if tls is None:
            break
    return found


def grpc_aio_transport(service: InferenceService, settings: ServerSettings, port: int) -> GrpcAioTransport:
    """grpc.aio on the gRPC port."""
    from gpuserve.front.endpoint.grpc_aio import GrpcAioTransport
    from gpuserve.front.endpoint.grpc_aio_certificates import GrpcCertificates

    host, tls = settings.host, _tls_on(settings, "grpc")
    return GrpcAioTransport(
        service,
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        settings.max_request_nbytes,
        _forwarding(settings, settings.grpc_header_forward_pattern),
        _policy(settings),
        settings.grpc_response_compression,
        None if tls is None else GrpcCertificates(tls),
    )


def _policy(settings: ServerSettings) -> Policy:
    return Policy(all_rules(settings), settings.remote_control)


def _forwarding(settings: ServerSettings, pattern: str) -> HeaderForwarding | None:
    return forwarding(pattern, token_headers(all_rules(settings)))


def _tls_on(settings: ServerSettings, role: str) -> TlsFiles | None:
    return tls_files(settings) if role in settings.tls_ports else None
