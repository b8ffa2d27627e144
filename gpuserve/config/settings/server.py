"""The settings of a server as one frozen class, without its models. The command line, the config file and
``Server`` all produce a ``ServerSettings``; the supervisor sends it to the front. The classes are option
tables: each setting is defined once (see ``gpuserve/model/options.py``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.config.settings.logs import DEFAULT, ISO8601, LogSettings
from gpuserve.config.settings.values import (
    AUTO,
    CONTROL_GROUPS,
    ENDPOINT_GROUPS,
    AccessRule,
    mask_userinfo,
    read_ingress_processes,
    read_pattern,
    read_token,
)
from gpuserve.devices.names import CPU, OFF, ON
from gpuserve.model.options import NBYTES, declared, option, rows, spelled

#: The name of the trace settings that clients changed, in messages between front and supervisor.
TRACE: Final = "trace"
NATIVE: Final = "native"
GRPCIO: Final = "grpcio"
#: Values of ``trace.mode`` and ``trace.level``.
TRITON: Final = "triton"
OPENTELEMETRY: Final = "opentelemetry"
TRACE_LEVELS: Final = ("TIMESTAMPS", "TENSORS")
TLS_PORTS: Final = ("http", "grpc", "metrics")
#: Values of ``model_control``.
NO_CONTROL: Final = "none"
EXPLICIT: Final = "explicit"
POLL: Final = "poll"
_URL: Final = re.compile(r"https?://[^\s/]")
_ORIGIN: Final = re.compile(r"https?://[^\s/?#@]+", re.IGNORECASE)
#: The value of ``grpc_response_compression`` that switches compression off.
NO_COMPRESSION: Final = "none"
GRPC_COMPRESSIONS: Final = (NO_COMPRESSION, "low", "medium", "high")
MAX_PORT: Final = 65535
#: Default of ``lame_duck_s`` for a server that gets SIGTERM and has no terminal.
TERMINATED_LAME_DUCK_S: Final = 2.0
#: Value of ``rate_limit``, besides ``OFF``.
EXECUTION_COUNT: Final = "execution_count"
#: Value of ``dashboard``, besides ``ON`` and ``OFF``.
LOCAL: Final = "local"
#: Values of ``access_log``, besides ``OFF``.
ERRORS: Final = "errors"
ALL: Final = "all"

#: The objects that a new value of a limit applies to; other transports cannot change such a limit.
NATIVE_ALONE: Final = "only with transport native"
_ADMITTED: Final = f"new connections and streams; {NATIVE_ALONE}"
_AT_ONCE: Final = f"all connections at once; {NATIVE_ALONE}"
_COUNTED: Final = "new requests, with full token buckets"


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """The amount of a resource: on one device, with "" on every device, or of a shared resource in total."""

    name: str
    count: int
    device: str = ""

    @classmethod
    def parse(cls, text: str) -> ResourceLimit:
        """Return the limit in ``name:count[:device]``, where a number is a GPU; raise ValueError."""
        name, _, rest = text.partition(":")
        count, _, device = rest.partition(":")
        if not name or not count.isascii() or not count.isdigit():
            expected = "'name:count' or 'name:count:device', such as 'memory:4' or 'memory:4:cuda:0'"
            raise ValueError(f"expected a resource as {expected}, given {text!r}")
        return cls(name, int(count), f"cuda:{device}" if device.isdigit() else device)


def read_resource(text: Any) -> str:
    ResourceLimit.parse(str(text))
    return str(text)


def read_origin(text: Any) -> str:
    """Return an origin of browser pages, or "*"; raise ValueError with the expected form for other texts."""
    if not isinstance(text, str) or (text != "*" and _ORIGIN.fullmatch(text) is None):
        raise ValueError(f"expected an origin such as 'https://app.example' or '*', given {text!r:.200}")
    return text.lower()


def read_url(url: Any) -> str:
    if not isinstance(url, str) or _URL.match(url) is None:
        shown = f"{mask_userinfo(str(url))!r:.200}"
        raise ValueError(f"expected a URL such as 'http://localhost:4318/v1/traces', given {shown}")
    return url


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Tracing of requests. Clients may change the first four settings while the server runs."""

    # fmt: off
    level: tuple[str, ...] = option((),
        "Recorded events of a traced request; empty traces nothing.", words=TRACE_LEVELS)
    rate: int = option(1000, "One of this many requests is traced.", least=1, most=(1 << 32) - 1)
    count: int = option(-1, "Number of traced requests; -1 is no limit.", least=-1, most=(1 << 31) - 1)
    log_frequency: int = option(0,
        "Traces per file (file.0, file.1, …); 0 writes all traces to one file.", least=0, most=(1 << 32) - 1)
    file: str = option("", "File that mode triton writes, as JSON.")
    mode: str = option(TRITON,
        "triton writes a file; opentelemetry sends spans, and needs gpuserve[otel].",
        words=(TRITON, OPENTELEMETRY))
    url: str = option("http://localhost:4318/v1/traces",
        "URL to which mode opentelemetry sends spans, as OTLP over HTTP.", read=read_url)
    resource: dict[str, str] = option({"service.name": "gpuserve"},
        "Attributes of the OpenTelemetry resource.")
    # fmt: on


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The log settings that clients read as ``log_file``, ``log_info`` and so on. None: by ``log_level``."""

    # fmt: off
    file: str = option("", "File that the log of gpuserve serve is appended to; empty: stderr.")
    info: bool | None = option(None, "Whether level info is logged; null: by log_level.")
    warning: bool | None = option(None, "Whether level warning is logged; null: by log_level.")
    error: bool | None = option(None, "Whether level error is logged; null: by log_level.")
    verbose_level: int | None = option(None,
        "Level debug is logged if this is above 0; null: by log_level.", least=0, most=(1 << 32) - 1)
    time_format: str = option(DEFAULT, "Form of the time in lines of text.", words=(DEFAULT, ISO8601))
    # fmt: on


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that workers may take before models with ``on_demand`` go. None: no limit."""

    # fmt: off
    host: int | None = option(None,
        "Bytes of host memory of all workers; null: no limit.", least=1, unit=NBYTES)
    cuda: int | None = option(None,
        "Bytes of memory of all workers on each GPU; null: no limit.", least=1, unit=NBYTES)
    # fmt: on

    def limits(self, devices: Iterable[str]) -> dict[str, int]:
        """Return the limits in bytes, of the host under the name of the CPU and of the GPUs among devices."""
        limits = {CPU: self.host} | {one: self.cuda for one in devices if one != CPU}
        return {device: limit for device, limit in limits.items() if limit is not None}


@spelled
@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of a server, without its models. Times are in seconds, sizes in bytes."""

    # fmt: off
    host: str = option("0.0.0.0", "Address to listen on.", some=True)
    http_port: int | None = option(8000,
        "Port of HTTP; 0 picks a free port, null switches HTTP off.", least=0, most=MAX_PORT)
    grpc_port: int | None = option(8001,
        "Port of gRPC; 0 picks a free port, null switches gRPC off.", least=0, most=MAX_PORT)
    metrics_port: int | None = option(8002,
        "Port of /metrics; 0 picks a free port, null switches it off.", least=0, most=MAX_PORT)
    health_port: int | None = option(None,
        "Port of the health endpoints only, never with TLS and never with a token; 0 picks a free port, "
        "null switches it off.", least=0, most=MAX_PORT)
    grpc_host: str | None = option(None, "Address of the gRPC port; null: the value of host.", some=True)
    metrics_host: str | None = option(None,
        "Address of the metrics port; null: the value of host.", some=True)
    transport: str = option(NATIVE,
        "native, the server's own, serves both protocols on both ports; with grpcio, grpc.aio serves the "
        "gRPC port.", words=(NATIVE, GRPCIO))
    ingress_processes: int = option(1,
        "Ingress processes, which hold the connections of HTTP and gRPC; 1: the front holds them itself. "
        "auto: one for every four processors that the server may use, 8 at most.",
        least=1, words=(AUTO,), former="doors", read=read_ingress_processes)
    name: str = option("gpuserve", "Name of the server.", some=True)
    # Triton's examples and programs derived from them fail if metadata has another name than "triton".
    compat_name: str | None = option(None,
        "Name of the server in the v2 metadata alone, for clients that require Triton's name; null: the "
        "value of name.", words=(TRITON,))
    drain_timeout_s: float = option(30.0,
        "Seconds that queued requests have after SIGTERM, or after the lame duck.",
        least=0, live="later shutdowns and unloads")
    lame_duck_s: float | None = option(None,
        "Seconds after SIGTERM in which requests are still accepted while the server is not ready; null: 2,"
        " but 0 at a terminal and for Ctrl-C, drain and stop().", least=0, live="later shutdowns")
    max_connection_age_s: float = option(0.0,
        "Seconds after which a connection accepts no more requests, give or take 10 %; its running requests"
        " are finished, within an hour. 0 is no limit.",
        least=0, live=f"new connections; {NATIVE_ALONE}")
    max_connections: int = option(16384,
        "Concurrent connections over all ports except the health port; fewer if the limit of open files is "
        "lower.", least=1, live=_ADMITTED)
    max_connections_per_address: int = option(8192,
        "Concurrent connections from one address (IPv6: one /64 network), three quarters of max_connections"
        " at most.", least=1, live=_ADMITTED)
    max_streams: int = option(16384,
        "Concurrent gRPC streams that have received a message, over all connections: inference, health "
        "watches, reflection. One address may have three quarters of them.", least=1, live=_ADMITTED)
    max_half_requests: int = option(16384,
        "Incomplete requests over HTTP/2, over all connections; checked about once a second. If there are "
        "more, connections of the address with the most are closed.", least=1, live=_AT_ONCE)
    head_timeout_s: float = option(10.0,
        "Seconds that the head of a request may take, from its first byte.", least=0, live=_AT_ONCE)
    idle_timeout_s: float = option(300.0,
        "Seconds after which a connection without a request is closed.", least=0, live=_AT_ONCE)
    body_grace_s: float = option(20.0,
        "Seconds over which the rate of a request's body is measured. Streams of requests have no limit.",
        least=1, live=_AT_ONCE)
    min_body_rate: int = option(500,
        "Least rate of a request's body, in bytes per second; slower requests are refused.",
        least=0, live=_AT_ONCE)
    answer_grace_s: float = option(300.0,
        "Seconds over which the rate is measured at which a client reads its responses.",
        least=1, live=_AT_ONCE)
    min_answer_rate: int = option(100,
        "Least rate at which a client reads its responses, in bytes per second; slower connections are "
        "closed.", least=0, live=_AT_ONCE)
    max_unsent_nbytes: int = option(128 << 20,
        "Bytes of responses that are held for clients that do not read; beyond that, responses are refused "
        "and the connections closed.", least=1, live=_AT_ONCE)
    max_requests_per_s: int | None = option(None,
        "Requests per second that each client may send, by a token bucket; null is no limit. A client is an"
        " access token of access_rules, or without a token an address (IPv6: one /64 network).",
        least=1, most=1_000_000, live=_COUNTED)
    max_request_burst: int | None = option(None,
        "With max_requests_per_s: requests that a client may send at once, the capacity of its token "
        "bucket; null: the number per second.", least=1, most=1_000_000, live=_COUNTED)
    load_timeout_s: float = option(900.0,
        "Seconds that a model may take to load; 0 is no limit.", least=0, live="workers that start later")
    hang_timeout_s: float = option(30.0,
        "Seconds after which a front with a blocked event loop is replaced, not counting time in which it "
        "waited for a CPU; its stacks are logged after a third of them. After twice as many seconds a "
        "server with a blocked supervisor is not live. 0: neither.", least=0)
    max_request_nbytes: int = option(4 << 30, "Largest accepted request, in bytes.", least=1)
    max_arena_nbytes: int = option(8 << 30, "Shared memory for the inputs of one model, in bytes.", least=1)
    max_intake_nbytes: int = option(256 << 20,
        "Memory for request bodies outside the arenas, over all models and connections, in bytes: JSON, "
        "requests of streams, compressed bodies, and open requests whose body is awaited; clients of one "
        "address may have seven eighths. Beyond that, requests are refused.", least=1 << 20)
    max_inflated_nbytes: int = option(64 << 20,
        "Largest decompressed size of a compressed request, in bytes; only with transport native.", least=1)
    max_inflation_ratio: int = option(500,
        "Largest ratio of decompressed to compressed size of a request over 8 MiB; only with transport "
        "native.", least=1)
    shared_memory_owners: tuple[int, ...] = option((),
        "Users (uid) whose system shared memory any client may register. The memory of other users may be "
        "registered only by clients of the same user, as the kernel reports it: on this machine, without a "
        "proxy, transport native.", least=0, live="regions that are registered later")
    shared_memory_locked_nbytes: int = option(1 << 30,
        "Bytes of clients' system shared memory that each worker on a GPU may page-lock, so that the GPU "
        "copies from and to it directly. 0 locks none.", least=0, live="workers that start later")
    gpu_locked_nbytes: int = option(0,
        "Limit of the host memory that the workers on each GPU page-lock for faster copies, in bytes, "
        "divided equally among those that run. 0: no limit.",
        least=0, live="workers that start later")
    memory: MemoryBudget = option(MemoryBudget(),
        "Memory budgets of the models with on_demand.", live="the models at once")
    response_cache_nbytes: int = option(0,
        "Memory for the responses of models with response_cache, in bytes; 0 switches the cache off. "
        "Requests with more than 8 MiB of inputs or outputs are not cached.",
        least=0)
    http_header_forward_pattern: str = option("",
        "HTTP headers that match this regular expression are copied to Request.parameters.",
        read=read_pattern)
    grpc_header_forward_pattern: str = option("",
        "gRPC metadata keys that match this regular expression are copied to Request.parameters.",
        read=read_pattern)
    grpc_response_compression: str = option(NO_COMPRESSION,
        "Compression level of gRPC responses, for clients that accept compression; messages under 1 KiB are"
        " not compressed.", words=GRPC_COMPRESSIONS)
    tls_certfile: str | None = option(None, "Certificate chain of TLS, a PEM file.", some=True)
    tls_keyfile: str | None = option(None,
        "Key of the certificate, a PEM file without a passphrase.", some=True)
    tls_client_ca: str | None = option(None,
        "Certificate authorities of client certificates, a PEM file; null: clients need no certificate.",
        some=True)
    tls_ports: tuple[str, ...] = option(TLS_PORTS,
        "Ports that use TLS if there is a certificate.", words=TLS_PORTS)
    restricted_endpoints: tuple[str, ...] = option((),
        "Groups of endpoints that need access_token.", words=ENDPOINT_GROUPS)
    access_token: str | None = option(None,
        "Access token of the restricted endpoints.", read=read_token, secret=True)
    access_rules: tuple[AccessRule, ...] = option((),
        "Access tokens for groups of endpoints: groups, token, header (triton-access-token).", secret=True)
    remote_control: tuple[str, ...] = option((),
        "Groups whose control operations clients on other machines may use without a token: admin, logging,"
        " model-repository, shared-memory, trace.", words=CONTROL_GROUPS)
    allowed_hosts: tuple[str, ...] = option((),
        "Host names that browser pages may use for this server, besides addresses, localhost, the machine's"
        " name and names that cannot be registered, such as names without a dot; * allows any name. Empty: "
        "only requests from this machine are checked.")
    cors_origins: tuple[str, ...] = option((),
        "Origins of browser pages that may read answers, such as https://app.example; * allows any origin.",
        read=read_origin)
    admin_api: bool = option(False,
        "Whether operators may observe and control the server over HTTP, by /v2/admin/….")
    dashboard: str = option(LOCAL,
        "Who sees the dashboard at / of the HTTP port: browsers on this machine, without a proxy (local), "
        "anybody (on), or nobody (off). A token for the group dashboard grants access too.",
        words=(LOCAL, ON, OFF))
    attachable: bool = option(True,
        "Whether other programs of the same user on this machine may serve models through this server.")
    require_control: bool = option(False,
        "Whether the server exits at its start if other processes use every address by which operators or "
        "programs would reach it on this machine; otherwise an error is logged.")
    model_control: str = option(NO_CONTROL,
        "Whether clients may load and unload models (explicit), or the server polls the files of its models"
        " (poll).", words=(NO_CONTROL, EXPLICIT, POLL), live="later requests and polls")
    repository_poll_s: float = option(15.0,
        "With model_control poll: seconds between two polls of the files; 0 never polls.",
        least=0, live="later polls")
    load_at_start: tuple[str, ...] | None = option(None,
        "With model_control explicit: names of the models to load at the start; null: all models.",
        live="models that enter the list are loaded, models that leave it are unloaded")
    exit_on_error: bool = option(True,
        "Whether the server exits if a model cannot be loaded at its start; otherwise it serves the other "
        "models, and is ready only if min_ready_instances is 0.")
    rate_limit: str = option(OFF,
        "execution_count: an instance executes only while it holds the resources that it declares.",
        words=(OFF, EXECUTION_COUNT))
    rate_limit_resources: tuple[str, ...] = option((),
        "Amounts of resources: name:count, or name:count:device for one device; by default the largest "
        "amount that an instance needs.", read=read_resource)
    numa_affinity: bool = option(True,
        "Whether workers of a GPU are bound to the CPUs and the memory next to the GPU.")
    mps: str = option(AUTO,
        "Whether workers on GPUs use CUDA's MPS. auto: a control daemon that runs; the server starts one for "
        "instances with gpu_share. on: always; the server starts a daemon if none runs. off: never.",
        words=(AUTO, ON, OFF))
    min_healthy_devices: int = option(1,
        "Number of usable GPUs among those that models name from which on the server is ready, or all of "
        "them if they are fewer.", least=0, live="the readiness at once")
    min_ready_instances: int = option(1,
        "Number of ready instances of each model from which on the server is ready, or all of them if a "
        "model has fewer; 0: any number.", least=0, live="the readiness at once")
    gpu_health_interval_s: float = option(1.0,
        "Seconds between two readings of the GPUs' health; 0 switches readings off.", least=0)
    metrics_summaries: bool = option(False,
        "Whether /metrics has latency quantiles of the last minute.", live="requests that are answered later")
    log_format: str = option("text",
        "Format of the log lines, including output of the models.", words=("text", "json"))
    log_level: str = option("info",
        "Least severe level that is logged.",
        words=("debug", "info", "warning", "error"), live="later log lines, over the log settings of clients")
    log: LogOptions = option(LogOptions(), "Parts of the log settings, over log_level.")
    access_log: str = option(OFF,
        "Requests that are logged when they end, and whose response has the header x-request-id: failed "
        "requests (errors), or all.", words=(OFF, ERRORS, ALL))
    max_output_lines_per_s: int = option(1000,
        "Lines per second that a worker may print and report, with a burst of ten seconds; further lines "
        "are dropped, and counted in the log. 0 is no limit.", least=0, live="workers that start later")
    max_output_nbytes_per_s: int = option(1 << 20,
        "Bytes per second that a worker may print and report, with the same burst. 0 is no limit.",
        least=0, live="workers that start later")
    trace: TraceSettings = option(TraceSettings(),
        "Tracing of requests.", live="later requests, under the trace settings of clients")
    # fmt: on

    @property
    def ports(self) -> dict[str, int]:
        """The ports that are not switched off, by role: "http", "grpc", "metrics" and "health"."""
        ports = (self.http_port, self.grpc_port, self.metrics_port, self.health_port)
        roles = zip(("http", "grpc", "metrics", "health"), ports, strict=True)
        return {role: port for role, port in roles if port is not None}

    def host_of(self, role: str) -> str:
        """Return the address on which the port of a role ("http", "grpc", "metrics", "health") listens."""
        own = {"grpc": self.grpc_host, "metrics": self.metrics_host}.get(role)
        return self.host if own is None else own

    def log_settings(self) -> LogSettings:
        """Return the log settings that hold until clients change them."""
        given = dataclasses.asdict(self.log)
        given["format"] = given.pop("time_format")
        parts = {f"log_{name}": value for name, value in given.items() if value is not None}
        return LogSettings.of_level(self.log_level)._replace(**parts)

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> ServerSettings:
        return declared(cls, wire)


def with_changed_settings(settings: ServerSettings, changes: Mapping[str, Any]) -> ServerSettings:
    """Return the settings with changes, which are plain data as of ``ServerSettings.to_wire``."""
    return ServerSettings.from_wire({**settings.to_wire(), **changes})


def live_settings() -> dict[str, str]:
    """Return the settings that may change while a server runs, each with what a new value applies to."""
    return {name: row.option.live for name, row in rows(ServerSettings).items() if row.option.live}


def all_access_rules(settings: ServerSettings) -> tuple[AccessRule, ...]:
    """Return the access rules; the first one stands for ``restricted_endpoints`` and ``access_token``."""
    token = settings.access_token
    if not settings.restricted_endpoints or token is None:
        return tuple(settings.access_rules)
    return (AccessRule(tuple(settings.restricted_endpoints), token), *settings.access_rules)
