"""The endpoint of a front put together: from the settings to doors, and to the transports that open them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpuserve.front.doors.access.endpoints import ADMIN_PREFIX
from gpuserve.front.doors.access.forwarding import HeaderForwarding, forwarding
from gpuserve.front.doors.access.restrictions import Policy, token_headers
from gpuserve.front.doors.front_door import FrontDoor
from gpuserve.front.doors.grpc.door import GrpcDoor
from gpuserve.front.doors.grpc.health import WATCH
from gpuserve.front.doors.health.port import HealthPort
from gpuserve.front.doors.http.door import HttpDoor
from gpuserve.front.exchange.awaited import AwaitedRequests
from gpuserve.front.exchange.limits import Admission, Limits, OpenStreams
from gpuserve.front.exchange.transport import Transport
from gpuserve.front.observe.triton_metrics import Family, family
from gpuserve.front.server.connections import Connections
from gpuserve.front.server.transport import NativeTransport
from gpuserve.front.service.service import InferenceService
from gpuserve.settings.server import GRPCIO, NO_COMPRESSION, ServerSettings, all_rules
from gpuserve.settings.tls import TlsFiles, tls_files

if TYPE_CHECKING:
    from gpuserve.front.doors.grpcio.transport import GrpcAioTransport

#: Paths of requests that may be open while there is nothing to do, by how they begin.
_NO_WORK = (WATCH, ADMIN_PREFIX)


def transports(
    service: InferenceService,
    settings: ServerSettings,
    listeners: Mapping[str, int],
    grpc_port: int | None,
    admission: Admission,
) -> list[Transport]:
    """The servers on the listeners (descriptors by role); ``grpc_port`` is grpc.aio's own."""
    found: list[Transport] = []
    service.metrics_page.add(lambda: connection_families(admission))
    if settings.transport == GRPCIO and grpc_port is not None:
        found.append(_grpc_aio(service, settings, grpc_port, admission.streams))
    files = tls_files(settings)
    for tls in (files, None) if files else (None,):
        fds = {
            role: fd for role, fd in listeners.items() if role != "health" and _tls_on(settings, role) == tls
        }
        if fds:
            found.append(_native(service, settings, fds, tls, admission))
    if "health" in listeners:
        found.append(HealthPort(service, listeners["health"]))
    return found


def _native(
    service: InferenceService,
    settings: ServerSettings,
    fds: Mapping[str, int],
    tls: TlsFiles | None,
    admission: Admission,
) -> NativeTransport:
    """The server's own transport, on listeners by role."""
    requests = AwaitedRequests(service.intake)
    forwarded = _forwarding(settings, settings.http_header_forward_pattern)
    http = HttpDoor(
        service,
        requests,
        settings.max_request_nbytes,
        _policy(settings),
        forwarded,
        settings.allowed_hosts,
    )
    grpc = _grpc(service, settings, requests, admission.streams, settings.grpc_response_compression)
    accept = FrontDoor(grpc, http).accept
    accepts = {fd: http.accept_metrics if role == "metrics" else accept for role, fd in fds.items()}
    connections = Connections(admission, settings.max_connection_age_s, _NO_WORK)
    return NativeTransport(accepts, requests, connections, admission, tls)


def _grpc_aio(
    service: InferenceService, settings: ServerSettings, port: int, streams: OpenStreams
) -> GrpcAioTransport:
    """grpc.aio on the gRPC port, which compresses by itself. Its package is imported only here."""
    from gpuserve.front.doors.grpcio.certificates import GrpcCertificates
    from gpuserve.front.doors.grpcio.transport import GrpcAioTransport

    host, tls = settings.host, _tls_on(settings, "grpc")
    return GrpcAioTransport(
        _grpc(service, settings, AwaitedRequests(service.intake), streams).accept,
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        settings.max_request_nbytes,
        settings.grpc_response_compression,
        None if tls is None else GrpcCertificates(tls),
        settings.max_connection_age_s,
        settings.max_connections,
        settings.idle_timeout_s,
    )


def _grpc(
    service: InferenceService,
    settings: ServerSettings,
    requests: AwaitedRequests,
    streams: OpenStreams,
    compression: str = NO_COMPRESSION,
) -> GrpcDoor:
    forwarded = _forwarding(settings, settings.grpc_header_forward_pattern)
    nbytes, policy = settings.max_request_nbytes, _policy(settings)
    return GrpcDoor(service, requests, nbytes, policy, forwarded, compression, streams)


def limits_of(settings: ServerSettings) -> Limits:
    return Limits(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)})


def connection_families(admission: Admission) -> Iterable[Family]:
    """The metrics of the connections: how many are open, were refused, and took too long."""
    name = "gpuserve_connections"
    yield family(name, "gauge", "Connections that are open.", [({}, admission.n_open)])
    text = "Streams of gRPC that are open; one with a long head counts as several."
    yield family("gpuserve_streams", "gauge", text, [({}, admission.streams.n_open)])
    text, unsent_nbytes = "Answers that clients have not read.", sum(admission.unsent_nbytes.values())
    yield family(f"{name}_unsent_bytes", "gauge", text, [({}, unsent_nbytes)])
    for what, text, counts in (
        ("refused", "Connections and streams that were refused, by the limit they met.", admission.refused),
        ("late", "Connections and requests that were ended, by what took too long.", admission.late),
    ):
        yield family(
            f"{name}_{what}_total", "counter", text, [({"reason": key}, n) for key, n in counts.items()]
        )


def _policy(settings: ServerSettings) -> Policy:
    return Policy(all_rules(settings), settings.remote_control)


def _forwarding(settings: ServerSettings, pattern: str) -> HeaderForwarding | None:
    return forwarding(pattern, token_headers(all_rules(settings)))


def _tls_on(settings: ServerSettings, role: str) -> TlsFiles | None:
    return tls_files(settings) if role in settings.tls_ports else None
