"""The settings of a server as a whole: one frozen class that the CLI, the config file and ``Server`` all come
to, and that the supervisor hands to the front. The models are not in it. The classes are tables: each setting
is said once, for all of these (see ``gpuserve/options``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.options import declared, option, rows
from gpuserve.settings.access import (
    CONTROL_GROUPS,
    ENDPOINT_GROUPS,
    AccessRule,
    read_pattern,
    read_token,
)
from gpuserve.settings.doors import AUTO, read_doors
from gpuserve.settings.urls import without_userinfo

#: What the front and the supervisor call the trace settings that clients have changed.
TRACE: Final = "trace"
#: The transports, and one that there was.
NATIVE: Final = "native"
GRPCIO: Final = "grpcio"
_GONE: Final = "h2corn"
#: What ``trace.mode`` and ``trace.level`` may say.
TRITON: Final = "triton"
OPENTELEMETRY: Final = "opentelemetry"
TRACE_LEVELS: Final = ("TIMESTAMPS", "TENSORS")
#: The ports that can speak TLS.
TLS_PORTS: Final = ("http", "grpc", "metrics")
#: What ``model_control`` may say.
NO_CONTROL: Final = "none"
EXPLICIT: Final = "explicit"
POLL: Final = "poll"
_URL: Final = re.compile(r"https?://[^\s/]")
#: What ``grpc_response_compression`` says where there is none.
NO_COMPRESSION: Final = "none"
GRPC_COMPRESSIONS: Final = (NO_COMPRESSION, "low", "medium", "high")
MAX_PORT: Final = 65535
#: ``lame_duck_s`` where it is not said, for a server that is no person's at a terminal and gets SIGTERM.
TERMINATED_LAME_DUCK_S: Final = 2.0
#: What ``rate_limit`` may say.
OFF: Final = "off"
EXECUTION_COUNT: Final = "execution_count"
#: What ``dashboard`` may say, besides ``OFF``.
LOCAL: Final = "local"
ON: Final = "on"
#: What ``access_log`` may say, besides ``OFF``.
ERRORS: Final = "errors"
ALL: Final = "all"

#: What a new value of a limit of connections is for.
_ADMITTED: Final = "connections and streams that are made from now on; transport native alone"
_AT_ONCE: Final = "all connections at once; transport native alone"
_COUNTED: Final = "requests from now on, with full token buckets"


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """How much of a resource there is: on one device, or with "" on each, and of a shared one in all."""

    name: str
    count: int
    device: str = ""

    @classmethod
    def parse(cls, text: str) -> ResourceLimit:
        """``name:count`` or ``name:count:device``, where a number is that of a GPU. Raises ValueError: it has
        another form; the text says which was expected.
        """
        name, _, rest = text.partition(":")
        count, _, device = rest.partition(":")
        if not name or not count.isascii() or not count.isdigit():
            raise ValueError(
                f"expected a resource as 'name:count' or 'name:count:device', such as 'memory:4' or "
                f"'memory:4:cuda:0', given {text!r}"
            )
        return cls(name, int(count), f"cuda:{device}" if device.isdigit() else device)


def read_transport(name: Any) -> Any:
    """The name as it is, unless a former server knew it. Raises ValueError: it says what there is instead."""
    if name == _GONE:
        raise ValueError(
            f"transport {_GONE} is gone: leave transport out, or say {NATIVE}, the server's own, which "
            f"serves both protocols on both ports; with {GRPCIO}, grpc.aio has the gRPC port"
        )
    return name


def read_resource(text: Any) -> str:
    """A resource as ``ResourceLimit.parse`` takes it. Raises ValueError: it has another form."""
    ResourceLimit.parse(str(text))
    return str(text)


def _shown(url: Any) -> str:
    return f"{without_userinfo(str(url))!r:.200}"


def read_url(url: Any) -> str:
    if not isinstance(url, str) or _URL.match(url) is None:
        raise ValueError(f"expected a URL such as 'http://localhost:4318/v1/traces', given {_shown(url)}")
    return url


def read_metrics_url(url: Any) -> str:
    if not isinstance(url, str) or _URL.match(url) is None:
        raise ValueError(f"expected a URL such as 'http://localhost:4318/v1/metrics', given {_shown(url)}")
    return url


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """How requests are traced from the start on; clients may change the first four while the server runs."""

    level: tuple[str, ...] = option(
        (), "What is noted of a traced request; empty traces nothing.", words=TRACE_LEVELS
    )
    rate: int = option(1000, "One in so many requests is traced.", least=1, most=(1 << 32) - 1)
    count: int = option(-1, "How many are traced in all; -1 is no limit.", least=-1, most=(1 << 31) - 1)
    log_frequency: int = option(
        0,
        "How many traces go into one file (file.0, file.1, …); 0 puts all into one.",
        least=0,
        most=(1 << 32) - 1,
    )
    file: str = option("", "The file that mode triton writes, as JSON.")
    mode: str = option(
        TRITON,
        "triton writes a file; opentelemetry sends spans, and needs gpuserve[otel].",
        words=(TRITON, OPENTELEMETRY),
    )
    url: str = option(
        "http://localhost:4318/v1/traces",
        "Where mode opentelemetry sends spans, as OTLP over HTTP.",
        read=read_url,
    )
    resource: dict[str, str] = option(
        {"service.name": "gpuserve"}, "Attributes of the OpenTelemetry resource."
    )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything a server is told besides its models. Times are in seconds, sizes in bytes."""

    host: str = option("0.0.0.0", "Address to listen on.", some=True)
    http_port: int | None = option(
        8000, "Port of HTTP; 0 picks a free one, null switches it off.", least=0, most=MAX_PORT
    )
    grpc_port: int | None = option(
        8001, "Port of gRPC; 0 picks a free one, null switches it off.", least=0, most=MAX_PORT
    )
    metrics_port: int | None = option(
        8002, "Port of /metrics; 0 picks a free one, null switches it off.", least=0, most=MAX_PORT
    )
    health_port: int | None = option(
        None,
        "Port of health alone, never with TLS and never with a token; 0 picks a free one, null switches it "
        "off.",
        least=0,
        most=MAX_PORT,
    )
    grpc_host: str | None = option(None, "Address of the gRPC port alone; null: that of host.", some=True)
    metrics_host: str | None = option(
        None, "Address of the metrics port alone; null: that of host.", some=True
    )
    transport: str = option(
        NATIVE,
        "native, the server's own, serves both protocols on both ports; with grpcio, grpc.aio has the gRPC "
        "port.",
        words=(NATIVE, GRPCIO),
        read=read_transport,
    )
    doors: int = option(
        1,
        "Processes that have the connections of HTTP and gRPC; 1: the front has them itself. auto: one for "
        "every four processors that the server may use, 8 at most.",
        least=1,
        words=(AUTO,),
        read=read_doors,
    )
    name: str = option("gpuserve", "What the server calls itself.", some=True)
    # Triton's own examples and programs made of them end where metadata has another name than its.
    compat_name: str | None = option(
        None,
        "What the v2 metadata alone gives as the server's name, for clients that insist on Triton's; null: "
        "that of name.",
        words=(TRITON,),
    )
    drain_timeout_s: float = option(
        30.0,
        "Seconds that queued requests have after SIGTERM, or after the lame duck.",
        least=0,
        live="ends and unloads from now on",
    )
    lame_duck_s: float | None = option(
        None,
        "Seconds that requests are still taken after SIGTERM, while the server is not ready; null: 2, but 0 "
        "at a terminal and for Ctrl-C, drain and stop().",
        least=0,
        live="ends from now on",
    )
    max_connection_age_s: float = option(
        0.0,
        "Seconds after which a connection takes no more requests, give or take 10 %; what it has is "
        "finished, within an hour. 0 is no limit.",
        least=0,
        live="connections that are made from now on; transport native alone",
    )
    max_connections: int = option(
        16384,
        "Connections at once, over all ports but that of health; fewer where the limit of open files does "
        "not allow so many.",
        least=1,
        live=_ADMITTED,
    )
    max_connections_per_address: int = option(
        8192,
        "Of those, the connections from one address (of IPv6: one /64 network); three quarters of what there "
        "can be at most.",
        least=1,
        live=_ADMITTED,
    )
    max_streams: int = option(
        16384,
        "Streams of gRPC at once of which something has come, over all connections: those of inference, "
        "watches of health, reflection. From one address three quarters of them at most.",
        least=1,
        live=_ADMITTED,
    )
    max_half_requests: int = option(
        16384,
        "Requests over HTTP/2 that have not come whole, over all connections; looked at about once a second. "
        "Of more, connections of the address that has the most are closed.",
        least=1,
        live=_AT_ONCE,
    )
    head_timeout_s: float = option(
        10.0,
        "Seconds that the head of a request may take, from its first byte on.",
        least=0,
        live=_AT_ONCE,
    )
    idle_timeout_s: float = option(
        300.0,
        "Seconds after which a connection without a request is closed.",
        least=0,
        live=_AT_ONCE,
    )
    body_grace_s: float = option(
        20.0,
        "Seconds over which the rate is measured at which the body of a request comes. Streams of requests "
        "may take as long as they like.",
        least=1,
        live=_AT_ONCE,
    )
    min_body_rate: int = option(
        500,
        "Bytes a second of a request's body that are expected; slower ones are refused.",
        least=0,
        live=_AT_ONCE,
    )
    answer_grace_s: float = option(
        300.0,
        "Seconds over which the rate is measured at which a client reads its answers.",
        least=1,
        live=_AT_ONCE,
    )
    min_answer_rate: int = option(
        100,
        "Bytes a second that a client is expected to read of its answers; slower ones are closed.",
        least=0,
        live=_AT_ONCE,
    )
    max_unsent_nbytes: int = option(
        128 << 20,
        "Bytes of answers that are held for clients that read nothing; then more is refused, and they are "
        "closed.",
        least=1,
        live=_AT_ONCE,
    )
    max_requests_per_s: int | None = option(
        None,
        "Requests a second that each client may send, by a token bucket; null is no limit. A client is an "
        "access token of access_rules, or without one an address (of IPv6: one /64 network).",
        least=1,
        most=1_000_000,
        live=_COUNTED,
    )
    max_request_burst: int | None = option(
        None,
        "With max_requests_per_s: requests that a client may send at once, the capacity of its token bucket; "
        "null: as many as in a second.",
        least=1,
        most=1_000_000,
        live=_COUNTED,
    )
    load_timeout_s: float = option(
        900.0,
        "Seconds that a model may take to load; 0 is no limit.",
        least=0,
        live="workers that start from now on",
    )
    hang_timeout_s: float = option(
        30.0,
        "Seconds after which a front whose loop does not turn is replaced, not counting time in which it "
        "could run and had no CPU; its stacks are in the log after a third of them. After twice as many a "
        "server whose supervisor does not turn is not live. 0: neither.",
        least=0,
    )
    max_request_nbytes: int = option(4 << 30, "Largest request that is accepted, in bytes.", least=1)
    max_arena_nbytes: int = option(
        8 << 30, "Shared memory that a model's inputs may take, in bytes.", least=1
    )
    max_intake_nbytes: int = option(
        256 << 20,
        "Memory that bodies of requests may take beside the arenas, of all models and connections together, "
        "in bytes: JSON, requests of streams, what is compressed, and what is open and waits for its body; "
        "clients of one address may have seven eighths. Others are refused meanwhile.",
        least=1 << 20,
    )
    max_inflated_nbytes: int = option(
        64 << 20,
        "What a compressed request may come to, in bytes; transport native alone.",
        least=1,
    )
    max_inflation_ratio: int = option(
        500,
        "How many times its compressed size a request of over 8 MiB may come to; transport native alone.",
        least=1,
    )
    shared_memory_owners: tuple[int, ...] = option(
        (),
        "Users (uid) whose system shared memory any client may register. Of others only a client of that "
        "very user may, as the kernel knows it: on this machine, without a proxy between, transport native.",
        least=0,
        live="regions that are registered from now on",
    )
    shared_memory_locked_nbytes: int = option(
        1 << 30,
        "Of clients' system shared memory, so much may be page-locked by each worker on a GPU, in bytes: the "
        "GPU copies from and to it by itself then. 0 locks none.",
        least=0,
        live="workers that start from now on",
    )
    response_cache_nbytes: int = option(
        0, "Memory for the answers of models with response_cache, in bytes; 0 switches it off.", least=0
    )
    http_header_forward_pattern: str = option(
        "",
        "HTTP headers that this regular expression is found in reach Request.parameters.",
        read=read_pattern,
    )
    grpc_header_forward_pattern: str = option(
        "",
        "gRPC metadata that this regular expression is found in reach Request.parameters.",
        read=read_pattern,
    )
    grpc_response_compression: str = option(
        NO_COMPRESSION,
        "How hard responses over gRPC are compressed, for clients that can read it; messages under 1 KiB are "
        "not.",
        words=GRPC_COMPRESSIONS,
    )
    tls_certfile: str | None = option(None, "Certificate chain of TLS, a PEM file.", some=True)
    tls_keyfile: str | None = option(
        None, "Key of the certificate, a PEM file without a passphrase.", some=True
    )
    tls_client_ca: str | None = option(
        None,
        "Authorities that clients' certificates must come from, a PEM file; null asks for none.",
        some=True,
    )
    tls_ports: tuple[str, ...] = option(
        TLS_PORTS, "The ports that speak TLS, where there is a certificate.", words=TLS_PORTS
    )
    restricted_endpoints: tuple[str, ...] = option(
        (), "Groups of endpoints that need access_token.", words=ENDPOINT_GROUPS
    )
    access_token: str | None = option(
        None, "The token for the restricted endpoints.", read=read_token, secret=True
    )
    access_rules: tuple[AccessRule, ...] = option(
        (),
        "Which tokens open which groups of endpoints: groups, token, header (triton-access-token).",
        secret=True,
    )
    remote_control: tuple[str, ...] = option(
        (),
        "Groups whose control operations clients on other machines may ask for without a token: admin, "
        "logging, model-repository, shared-memory, trace.",
        words=CONTROL_GROUPS,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names by which pages in browsers may ask this server, besides addresses, localhost, the machine's "
        "name and names that are not for sale, such as one without a dot; * is any. Empty: only what comes "
        "from this machine is looked at.",
    )
    admin_api: bool = option(
        False, "Whether operators may see and control the server over HTTP, by /v2/admin/…."
    )
    dashboard: str = option(
        LOCAL,
        "Who sees the live page at / of the HTTP port: browsers on this machine, without a proxy between "
        "(local), anybody (on), or nobody (off). A token for the group dashboard opens it as well.",
        words=(LOCAL, ON, OFF),
    )
    attachable: bool = option(
        True, "Whether other programs of this user on this machine may serve models through it."
    )
    require_control: bool = option(
        False,
        "Whether the server ends at its start where other processes have every address by which operators "
        "or programs would reach it on this machine; else that is an error in the log.",
    )
    model_control: str = option(
        NO_CONTROL,
        "Whether clients may load and unload models (explicit), or the server follows the files of its "
        "models (poll).",
        words=(NO_CONTROL, EXPLICIT, POLL),
        live="requests and looks from now on",
    )
    repository_poll_s: float = option(
        15.0,
        "With model_control poll: seconds from one look at the files to the next; 0 never looks.",
        least=0,
        live="looks from now on",
    )
    load_at_start: tuple[str, ...] | None = option(
        None,
        "With model_control explicit: names of the models to load at the start; null is all.",
        live="models that come into the list, or go out of it, are loaded or unloaded",
    )
    exit_on_error: bool = option(
        True,
        "Whether the server ends where a model cannot be loaded at its start; else it serves the others, and "
        "is ready only where min_ready_instances is 0.",
    )
    rate_limit: str = option(
        OFF,
        "execution_count: an instance runs only while it has the resources that it declares.",
        words=(OFF, EXECUTION_COUNT),
    )
    rate_limit_resources: tuple[str, ...] = option(
        (),
        "How much there is of resources: name:count, or name:count:device for one device; of others as much "
        "as the instance needs that needs the most.",
        read=read_resource,
    )
    numa_affinity: bool = option(
        True, "Whether workers of a GPU keep to the CPUs and the memory that are next to it."
    )
    min_healthy_devices: int = option(
        1,
        "The server is ready while so many of the GPUs that its models name are not lost, or all of them "
        "where they are fewer.",
        least=0,
        live="the readiness at once",
    )
    min_ready_instances: int = option(
        1,
        "The server is ready while so many instances of each of its models are up, or all of them where a "
        "model has fewer; 0: whatever is up.",
        least=0,
        live="the readiness at once",
    )
    gpu_health_interval_s: float = option(
        1.0, "Seconds from one reading of the GPUs' state to the next; 0 reads none.", least=0
    )
    metrics_summaries: bool = option(
        False,
        "Whether /metrics has quantiles of the latencies of the last minute.",
        live="requests that are answered from now on",
    )
    metrics_otlp_url: str | None = option(
        None,
        "Where the numbers of /metrics are sent as OTLP over HTTP, such as http://collector:4318/v1/metrics; "
        "null sends none. Needs gpuserve[otel].",
        read=read_metrics_url,
    )
    metrics_otlp_period_s: float = option(15.0, "Seconds from one sending to the next.", least=0.1)
    log_format: str = option(
        "text", "Form of the log lines, output of the models included.", words=("text", "json")
    )
    log_level: str = option(
        "info",
        "Least severe level that is logged.",
        words=("debug", "info", "warning", "error"),
        live="the log from now on, over what clients have changed of it",
    )
    access_log: str = option(
        OFF,
        "Which requests have a line in the log at their end, and get the header x-request-id with their "
        "answer: those that failed (errors), or all.",
        words=(OFF, ERRORS, ALL),
    )
    max_output_lines_per_s: int = option(
        1000,
        "Lines a second that a worker may print and report, with ten seconds' worth at once; what is more is "
        "dropped, and counted in the log. 0 is no limit.",
        least=0,
        live="workers that start from now on",
    )
    max_output_nbytes_per_s: int = option(
        1 << 20,
        "The same in bytes.",
        least=0,
        live="workers that start from now on",
    )
    trace: TraceSettings = option(
        TraceSettings(),
        "Tracing of requests.",
        live="requests from now on, under what clients have changed of it",
    )

    def host_of(self, role: str) -> str:
        """The address that the port of a role ("http", "grpc", "metrics", "health") listens on."""
        own = {"grpc": self.grpc_host, "metrics": self.metrics_host}.get(role)
        return self.host if own is None else own

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> ServerSettings:
        return declared(cls, wire)


def adjusted(settings: ServerSettings, changes: Mapping[str, Any]) -> ServerSettings:
    """The settings with others among them, which are plain data (``ServerSettings.to_wire``)."""
    return ServerSettings.from_wire({**settings.to_wire(), **changes})


def live_settings() -> dict[str, str]:
    """The settings that may change while a server runs, each with what a new value is for."""
    return {name: row.option.live for name, row in rows(ServerSettings).items() if row.option.live}


def all_rules(settings: ServerSettings) -> tuple[AccessRule, ...]:
    """The rules of access, those that ``restricted_endpoints`` and ``access_token`` stand for first."""
    token = settings.access_token
    if not settings.restricted_endpoints or token is None:
        return tuple(settings.access_rules)
    return (AccessRule(tuple(settings.restricted_endpoints), token), *settings.access_rules)
