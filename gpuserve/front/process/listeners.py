"""A front's listeners: transports, from settings to handlers; renewed certificates; connection metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpuserve.config.settings.server import GRPCIO, ServerSettings
from gpuserve.config.settings.tls import TlsFiles, TlsFingerprint, certificate_expiry, check_files, tls_files
from gpuserve.core.errors import ConfigError
from gpuserve.front.ingress.channel_messages import IngressSetup
from gpuserve.front.ingress.ingress_monitor import IngressMonitor
from gpuserve.front.ingress.proxied_requests import IngressSession
from gpuserve.front.ipc.heap_memory import Intake
from gpuserve.front.live.live_feed import LivePage
from gpuserve.front.net.admission import Admission, limits_from_settings
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.net.server import Connections, IngressRow, NativeServer, ProtocolServer
from gpuserve.front.observability.access_log import AccessLog
from gpuserve.front.observability.metrics.prometheus import Family, family
from gpuserve.front.protocols import router
from gpuserve.front.protocols.access.endpoints import ADMIN_PREFIX, DASHBOARD_PREFIX
from gpuserve.front.protocols.access_log_middleware import with_access_log
from gpuserve.front.protocols.cors import with_cors
from gpuserve.front.protocols.grpc.unary_rpcs import HEALTH_WATCH
from gpuserve.front.protocols.health_port import HealthPort
from gpuserve.front.service.control import NotifySupervisor
from gpuserve.front.service.inference_service import InferenceService
from gpuserve.supervisor.control.front_messages import INGRESS_FIELDS, IngressDown, IngressUp, StartIngress
from gpuserve_worker.memory.arena import KINDS, ORPHANS

if TYPE_CHECKING:
    from gpuserve.front.protocols.grpcio.grpcio_server import GrpcAioServer

logger = logging.getLogger(__name__)

#: Starts a task whose failure ends the front.
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]

#: Path prefixes of requests that may stay open while the server is idle.
_NO_WORK: Final = (HEALTH_WATCH, ADMIN_PREFIX, DASHBOARD_PREFIX)


class FrontListeners:
    """The transports of a front, none before ``open``. Calls go to all of them; see ``ProtocolServer``."""

    def __init__(
        self,
        service: InferenceService,
        settings: ServerSettings,
        spawn: Spawn,
        live: LivePage | None = None,
        notify_supervisor: NotifySupervisor = lambda _: None,
    ) -> None:
        self._service = service
        self._live = live
        self._settings = settings
        self._spawn = spawn
        self._notify_supervisor = notify_supervisor
        self._transports: list[ProtocolServer] = []
        self._admission = Admission(limits_from_settings(settings), n_processes=settings.ingress_processes)

    async def open(self, listeners: dict[str, int]) -> None:
        """Accept connections on the listeners: descriptors by role ("http", "grpc", "metrics", "health")."""
        service, settings = self._service, self._settings
        service.metrics_page.add(lambda: connection_families(self._admission, tuple(self.ingresses())))
        service.metrics_page.add(lambda: intake_families(service.intake, tuple(self.ingresses())))
        if self._live is not None:
            self._live.feed.more = lambda: {
                "connections": self.n_connections,
                "doors": [dict(zip(INGRESS_FIELDS, one, strict=True)) for one in self.census_rows()],
            }
        self._transports += self._make_transports(dict(listeners))
        for transport in self._transports:
            await transport.start()
        files = tls_files(settings)
        if files is not None and self._transports:
            certificates = CertificateWatch(files, self._renew_certificates)
            service.metrics_page.add(certificates.families)
            self._spawn(certificates.run())

    async def close(self) -> None:
        for transport in self._transports:
            await transport.stop()

    async def stop_accepting(self) -> None:
        for transport in self._transports:
            await transport.stop_accepting()

    def announce(self) -> None:
        for transport in self._transports:
            transport.announce()

    @property
    def n_unaware(self) -> int:
        return sum(one.n_unaware for one in self._transports)

    @property
    def n_held(self) -> int:
        return sum(one.n_held for one in self._transports)

    def adjust(self, settings: ServerSettings) -> None:
        """Apply the connection limits of the settings."""
        limits = limits_from_settings(settings)
        self._admission.adjust(limits)
        for transport in self._transports:
            transport.adjust(dataclasses.asdict(limits))

    def ingress_up(self, message: IngressUp, fds: list[int]) -> None:
        for transport in self._transports:
            transport.ingress_up(message, fds)

    def ingress_down(self, message: IngressDown) -> None:
        for transport in self._transports:
            transport.ingress_down(message)

    def ingresses(self) -> Iterator[IngressRow]:
        """Yield the ingress processes."""
        for transport in self._transports:
            yield from transport.ingress_rows()

    def census_rows(self) -> tuple[tuple[int, int | None, str, int, int, float, int], ...]:
        """Return the ingress rows of a ``Census``."""
        return tuple(one[:4] + one.counts[:3] for one in self.ingresses())

    @property
    def n_connections(self) -> int:
        return self._admission.n_open

    def limit_age(self, max_age_s: float) -> None:
        for transport in self._transports:
            transport.limit_age(max_age_s)

    async def _renew_certificates(self) -> None:
        for transport in self._transports:
            await transport.renew()

    # ---- transports ---------------------------------------------------------------------------

    def _make_transports(self, listeners: dict[str, int]) -> Iterator[ProtocolServer]:
        settings, files = self._settings, tls_files(self._settings)
        if settings.transport == GRPCIO and "grpc" in listeners:
            yield self._grpc_aio(listeners.pop("grpc"))
        if settings.ingress_processes > 1:
            fds = {role: fd for role, fd in listeners.items() if role in {"http", "grpc"}}
            if fds:
                yield self._ingress_monitor(fds)
            listeners = {role: fd for role, fd in listeners.items() if role not in fds}
        for tls in (files, None) if files else (None,):
            fds = {
                role: fd for role, fd in listeners.items() if role != "health" and self._tls_of(role) == tls
            }
            if fds:
                yield self._native(fds, tls)
        if "health" in listeners:
            yield HealthPort(self._service, listeners["health"])

    def _ingress_monitor(self, fds: Mapping[str, int]) -> IngressMonitor:
        service, settings, requests = self._service, self._settings, AsyncRequests(self._service.intake)
        http, grpc = router.make_handlers(service, settings, requests, self._admission, self._live)
        ingresses = IngressMonitor(
            {fd: self._tls_of(role) is not None for role, fd in fds.items()},
            partial(IngressSession, service, router.RequestRouter(grpc, http).accept),
            requests,
            self._admission,
            IngressSetup(settings.to_wire(), 0, _NO_WORK, {}),
            tls_files(settings),
            service.events.publish,
            lambda number: self._notify_supervisor(StartIngress(number)),
        )
        service.control.log.subscribe(ingresses.log_as)
        return ingresses

    def _native(self, fds: Mapping[str, int], tls: TlsFiles | None) -> NativeServer:
        settings, admission, requests = self._settings, self._admission, AsyncRequests(self._service.intake)
        http, grpc = router.make_handlers(self._service, settings, requests, admission, self._live)
        log = AccessLog.of(settings)
        limit = router.make_rate_limit(settings, admission)
        accept = with_cors(settings.cors_origins, router.RequestRouter(grpc, http, limit).accept)
        accept = with_access_log(log, accept)
        metrics = with_access_log(log, http.accept_metrics)
        accepts = {fd: metrics if role == "metrics" else accept for role, fd in fds.items()}
        connections = Connections(admission, settings.max_connection_age_s, _NO_WORK)
        return NativeServer(accepts, requests, connections, admission, tls)

    def _grpc_aio(self, fd: int) -> GrpcAioServer:
        """Return the grpc.aio transport on the port of a listener. Its package is imported only here."""
        from gpuserve.front.protocols.grpcio.grpcio_server import GrpcAioServer, GrpcCertificates

        with socket.socket(fileno=os.dup(fd)) as listener:
            port = listener.getsockname()[1]
        settings, requests = self._settings, AsyncRequests(self._service.intake)
        host, tls = settings.host_of("grpc"), self._tls_of("grpc")
        handler = router.make_grpc_handler(self._service, settings, requests, self._admission)
        accept = router.grpc_only(handler, router.make_rate_limit(settings, self._admission))
        return GrpcAioServer(
            with_access_log(AccessLog.of(settings), accept),
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            settings.max_request_nbytes,
            settings.grpc_response_compression,
            None if tls is None else GrpcCertificates(tls),
            settings.max_connection_age_s,
            settings.max_connections,
            settings.idle_timeout_s,
        )

    def _tls_of(self, role: str) -> TlsFiles | None:
        return tls_files(self._settings) if role in self._settings.tls_ports else None


# ---- certificates --------------------------------------------------------------------------------

#: The period of checking the certificate files.
_INTERVAL_S: Final = 2.0


class CertificateWatch:
    """Watches the certificate files, and calls ``renew`` when they have changed and are valid."""

    def __init__(
        self,
        files: TlsFiles,
        renew: Callable[[], Awaitable[None]],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._files = files
        self._renew = renew
        self._sleep = sleep
        self._seen: TlsFingerprint | None = None
        #: Expiry of the certificate in use, in seconds since 1970; None if it could not be read.
        self._expires_at: float | None = None

    def families(self, clock: Callable[[], float] = time.time) -> Iterator[Family]:
        if self._expires_at is not None:
            name, text = "gpuserve_certificate_expiry_seconds", "Until the TLS certificate in use expires."
            yield family(name, "gauge", text, [({}, self._expires_at - clock())])

    async def run(self) -> None:
        self._seen = self._stamp()
        self._expires_at = self._expiry()
        while True:
            await self._sleep(_INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Check the files once. Unusable files are logged once, and the certificate in use stays."""
        stamp = self._stamp()
        if stamp is None or stamp == self._seen:
            return
        self._seen = stamp
        try:
            await asyncio.to_thread(check_files, self._files)
            await self._renew()
            self._expires_at = self._expiry()
        except (ConfigError, OSError, ValueError) as error:
            # Files are replaced one after the other; the last change is checked again.
            logger.warning("rejected renewed TLS files: %s", error)
        else:
            logger.info("loaded renewed TLS certificate for new connections")

    def _expiry(self) -> float | None:
        try:
            return certificate_expiry(self._files)
        except ConfigError:  # a file is being replaced; the next check reads it again
            return None

    def _stamp(self) -> TlsFingerprint | None:
        try:
            return self._files.fingerprint()
        except OSError:  # between the old file and the new one
            return None


# ---- metrics -------------------------------------------------------------------------------------

#: Metrics of each ingress process: end of the name, kind, help text, and field of its counts.
_INGRESS_METRICS: Final = (
    ("requests_total", "counter", "Requests received by the ingress process.", "n_requests"),
    ("cpu_seconds_total", "counter", "CPU time used by the ingress process.", "cpu_s"),
    ("restarts_total", "counter", "Restarts of the ingress process.", "restarts"),
    ("arena_bytes", "gauge", "Shared memory reserved by the ingress process for inputs.", "arena_nbytes"),
    ("arena_blocks", "gauge", "Blocks of that memory in use.", "arena_blocks"),
)


def connection_families(admission: Admission, ingresses: Sequence[IngressRow] = ()) -> Iterator[Family]:
    """Yield the metrics of connections and streams, open, refused and late, and of each ingress process."""
    name = "gpuserve_connections"
    yield family(name, "gauge", "Connections that are open.", [({}, admission.n_open)])
    text = "Streams of gRPC that are open; one with a long head counts as several."
    n_streams = admission.streams.n_open + sum(ingress.counts.n_streams for ingress in ingresses)
    yield family("gpuserve_streams", "gauge", text, [({}, n_streams)])
    unsent_nbytes = sum(admission.unsent_nbytes.values())
    unsent_nbytes += sum(ingress.counts.unsent_nbytes for ingress in ingresses)
    text = "Bytes of answers that clients have not read."
    yield family(f"{name}_unsent_bytes", "gauge", text, [({}, unsent_nbytes)])
    refused, late = Counter(admission.refused), Counter(admission.late)
    limited = Counter(admission.rates.refused)
    for ingress in ingresses:
        refused.update(ingress.counts.refused)
        late.update(ingress.counts.late)
        limited.update(ingress.counts.limited)
    for what, text, counts in (
        ("refused", "Connections and streams that were refused, by the limit they met.", refused),
        ("late", "Connections and requests that were ended, by what took too long.", late),
    ):
        values = [({"reason": key}, n) for key, n in counts.items()]
        yield family(f"{name}_{what}_total", "counter", text, values)
    text = "Requests that were refused because their client was over max_requests_per_s."
    values = [({"client": kind}, n) for kind, n in limited.items()]
    yield family("gpuserve_requests_rate_limited_total", "counter", text, values)
    yield from _ingress_families(ingresses)


def intake_families(intake: Intake, ingresses: Sequence[IngressRow] = ()) -> Iterator[Family]:
    """Yield the heap memory of request bodies, and the requests refused for lack of it."""
    text = "Memory that bodies of requests take on the heap of the front, beside the arenas."
    nbytes = intake.nbytes + sum(ingress.counts.intake_nbytes for ingress in ingresses)
    yield family("gpuserve_intake_bytes", "gauge", text, [({}, nbytes)])
    text = "Requests that were refused because there was no memory for their bodies."
    refused = intake.refused + sum(ingress.counts.intake_refused for ingress in ingresses)
    yield family("gpuserve_intake_refused_total", "counter", text, [({}, refused)])
    text = "Memory that its owner did not give back and that was reclaimed, by kind: a defect of the server."
    counts = Counter(ORPHANS.reclaimed)
    for ingress in ingresses:
        counts.update(ingress.counts.reclaimed)
    values = [({"kind": kind}, counts[kind]) for kind in KINDS]
    yield family("gpuserve_memory_reclaimed_total", "counter", text, values)


def _ingress_families(ingresses: Sequence[IngressRow]) -> Iterator[Family]:
    if not ingresses:
        return
    values: list[tuple[dict[str, str], float]]
    values = [({"door": str(ingress.number)}, ingress.n_connections) for ingress in ingresses]
    yield family("gpuserve_door_connections", "gauge", "Connections of the ingress process.", values)
    for ending, kind, text, field in _INGRESS_METRICS:
        values = [({"door": str(ingress.number)}, getattr(ingress.counts, field)) for ingress in ingresses]
        yield family(f"gpuserve_door_{ending}", kind, text, values)
