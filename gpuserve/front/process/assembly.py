"""The endpoint of a front put together: from the settings to doors, and to the transports that open them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from gpuserve.config.settings.server import GRPCIO, ServerSettings
from gpuserve.config.settings.tls import TlsFiles, tls_files
from gpuserve.front.doors.access.endpoints import ADMIN_PREFIX, DASHBOARD_PREFIX
from gpuserve.front.doors.front_door import FrontDoor, grpc_alone
from gpuserve.front.doors.grpc.health import WATCH
from gpuserve.front.doors.health.port import HealthPort
from gpuserve.front.doors.logged import access_logged
from gpuserve.front.doors.opening import both_doors, grpc_door, rate_limit
from gpuserve.front.exchange.awaited import AwaitedRequests
from gpuserve.front.exchange.limits import Admission
from gpuserve.front.exchange.transport import Transport
from gpuserve.front.keeper.doors import Doors
from gpuserve.front.live.page import LivePage
from gpuserve.front.observe.access_log import AccessLog
from gpuserve.front.passage.messages import DoorSetup
from gpuserve.front.remote.served_door import ServedDoor
from gpuserve.front.server.connections import Connections
from gpuserve.front.server.transport import NativeTransport
from gpuserve.front.service.control import Say
from gpuserve.front.service.service import InferenceService
from gpuserve.supervisor.control.front_messages import StartIngress

if TYPE_CHECKING:
    from gpuserve.front.doors.grpcio.transport import GrpcAioTransport

#: Paths of requests that may be open while there is nothing to do, by how they begin.
_NO_WORK = (WATCH, ADMIN_PREFIX, DASHBOARD_PREFIX)


def transports(
    service: InferenceService,
    settings: ServerSettings,
    listeners: Mapping[str, int],
    grpc_port: int | None,
    admission: Admission,
    say: Say,
    live: LivePage | None = None,
) -> list[Transport]:
    """The servers on the listeners (descriptors by role); ``grpc_port`` is grpc.aio's own."""
    found: list[Transport] = []
    if settings.transport == GRPCIO and grpc_port is not None:
        found.append(_grpc_aio(service, settings, grpc_port, admission))
    if settings.doors > 1:
        fds = {role: listeners[role] for role in ("http", "grpc") if role in listeners}
        found += [_doors(service, settings, fds, admission, say, live)] if fds else []
        listeners = {role: fd for role, fd in listeners.items() if role not in fds}
    files = tls_files(settings)
    for tls in (files, None) if files else (None,):
        fds = {
            role: fd for role, fd in listeners.items() if role != "health" and _tls_on(settings, role) == tls
        }
        if fds:
            found.append(_native(service, settings, fds, tls, admission, live))
    if "health" in listeners:
        found.append(HealthPort(service, listeners["health"]))
    return found


def _doors(
    service: InferenceService,
    settings: ServerSettings,
    fds: Mapping[str, int],
    admission: Admission,
    say: Say,
    live: LivePage | None,
) -> Doors:
    """Processes that have the connections of listeners by role."""
    requests = AwaitedRequests(service.intake)
    http, grpc = both_doors(service, settings, requests, admission, live)
    tls = tls_files(settings)
    speak_tls = {fd: tls is not None and role in settings.tls_ports for role, fd in fds.items()}
    setup = DoorSetup(settings.to_wire(), 0, _NO_WORK, {})
    serve = partial(ServedDoor, service, FrontDoor(grpc, http).accept)

    def ask(number: int) -> None:
        say(StartIngress(number))

    doors = Doors(speak_tls, serve, requests, admission, setup, tls, service.events.tell, ask)
    service.control.log.follow(doors.log_as)
    return doors


def _native(
    service: InferenceService,
    settings: ServerSettings,
    fds: Mapping[str, int],
    tls: TlsFiles | None,
    admission: Admission,
    live: LivePage | None,
) -> NativeTransport:
    """The server's own transport, on listeners by role."""
    requests = AwaitedRequests(service.intake)
    http, grpc = both_doors(service, settings, requests, admission, live)
    log = AccessLog.of(settings)
    accept = access_logged(log, FrontDoor(grpc, http, rate_limit(settings, admission)).accept)
    metrics = access_logged(log, http.accept_metrics)
    accepts = {fd: metrics if role == "metrics" else accept for role, fd in fds.items()}
    connections = Connections(admission, settings.max_connection_age_s, _NO_WORK)
    return NativeTransport(accepts, requests, connections, admission, tls)


def _grpc_aio(
    service: InferenceService, settings: ServerSettings, port: int, admission: Admission
) -> GrpcAioTransport:
    """grpc.aio on the gRPC port, which compresses by itself. Its package is imported only here."""
    from gpuserve.front.doors.grpcio.certificates import GrpcCertificates
    from gpuserve.front.doors.grpcio.transport import GrpcAioTransport

    host, tls = settings.host_of("grpc"), _tls_on(settings, "grpc")
    door = grpc_door(service, settings, AwaitedRequests(service.intake), admission)
    return GrpcAioTransport(
        access_logged(AccessLog.of(settings), grpc_alone(door, rate_limit(settings, admission))),
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        settings.max_request_nbytes,
        settings.grpc_response_compression,
        None if tls is None else GrpcCertificates(tls),
        settings.max_connection_age_s,
        settings.max_connections,
        settings.idle_timeout_s,
    )


def _tls_on(settings: ServerSettings, role: str) -> TlsFiles | None:
    return tls_files(settings) if role in settings.tls_ports else None
