"""The endpoint of a front put together: from the settings to doors behind their guards, and to transports."""

from __future__ import annotations

import logging
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
from gpuserve.front.endpoint.restrictions import ENDPOINTS, Policy, token_headers
from gpuserve.front.endpoint.routes import Endpoint
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.transport import Transport
from gpuserve.settings import H2CORN, NO_COMPRESSION, ServerSettings
from gpuserve.tls import TlsFiles, tls_files

if TYPE_CHECKING:
    from gpuserve.front.endpoint.direct import DirectDoors
    from gpuserve.front.endpoint.grpc_aio import GrpcAioTransport

logger = logging.getLogger(__name__)


def doors(service: InferenceService, settings: ServerSettings, metrics_port: int | None) -> Doors:
    """Both doors, each behind its guard; ``metrics_port`` is the one that answers with metrics alone."""
    watch, most, policy = DisconnectWatch(), settings.max_request_nbytes, _policy(settings)
    http = HttpDoor(service, watch, most, _forwarding(settings, settings.http_header_forward_pattern))
    grpc: Application = GrpcDoor(
        service, watch, most, _forwarding(settings, settings.grpc_header_forward_pattern)
    )
    if settings.grpc_response_compression != NO_COMPRESSION:
        grpc = CompressedInference(grpc, settings.grpc_response_compression)
    guard = HttpGuard(http, policy, admin=settings.admin_api)
    return Doors(GrpcGuard(grpc, policy), guard, http.metrics_only, metrics_port)


def direct_doors(service: InferenceService, settings: ServerSettings, doors: Doors) -> DirectDoors:
    """The doors that need no ASGI, where nothing is to be looked at or done around inference."""
    from gpuserve.front.endpoint.direct import DirectDoors
    from gpuserve.front.endpoint.grpc_direct import GrpcDirectDoor
    from gpuserve.front.endpoint.http_direct import HttpDirectDoor

    most, access = settings.max_request_nbytes, ENDPOINTS[Endpoint.MODEL_INFER]
    grpc = http = None
    if _policy(settings).is_open(access):
        http = HttpDirectDoor(service, most, _forwarding(settings, settings.http_header_forward_pattern))
        if settings.grpc_response_compression == NO_COMPRESSION:
            grpc = GrpcDirectDoor(service, most, _forwarding(settings, settings.grpc_header_forward_pattern))
    return DirectDoors(doors, grpc, http)


def transports(
    service: InferenceService, doors: Doors, settings: ServerSettings, listeners: Mapping[str, int]
) -> list[Transport]:
    """Servers on the listeners, descriptors by role: one for those with TLS, one for the others."""
    make = _h2corn if settings.transport == H2CORN else _native
    found: list[Transport] = []
    for tls in (tls_files(settings), None):
        fds = {role: fd for role, fd in listeners.items() if _tls_on(settings, role) == tls}
        if fds:
            found += make(service, doors, settings, fds, tls)
        if tls is None:
            break
    return found


def _native(
    service: InferenceService,
    doors: Doors,
    settings: ServerSettings,
    fds: Mapping[str, int],
    tls: TlsFiles | None,
) -> list[Transport]:
    from gpuserve.front.server.transport import NativeTransport

    direct = direct_doors(service, settings, doors)
    # What the metrics port answers, the doors decide.
    ports = {role: None if role == "metrics" else direct for role in fds}
    by_fd = {fds[role]: door for role, door in ports.items()}
    return [NativeTransport(doors, by_fd, tls, settings.max_connection_age_s)]


def _h2corn(
    service: InferenceService,
    doors: Doors,
    settings: ServerSettings,
    fds: Mapping[str, int],
    tls: TlsFiles | None,
) -> list[Transport]:
    from gpuserve.front.h2corn_transport import H2cornTransport

    if settings.max_connection_age_s:
        logger.warning("max_connection_age_s does nothing with transport h2corn: its connections stay open")
    return [H2cornTransport(doors, list(fds.values()), settings.log_format, tls)]


def health_port(service: InferenceService, listener_fd: int) -> Transport:
    """The server of the health port, whatever the others are."""
    from gpuserve.front.health_port import HealthPort

    return HealthPort(service, listener_fd)


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
        settings.max_connection_age_s,
    )


def _policy(settings: ServerSettings) -> Policy:
    return Policy(all_rules(settings), settings.remote_control)


def _forwarding(settings: ServerSettings, pattern: str) -> HeaderForwarding | None:
    return forwarding(pattern, token_headers(all_rules(settings)))


def _tls_on(settings: ServerSettings, role: str) -> TlsFiles | None:
    return tls_files(settings) if role in settings.tls_ports else None
