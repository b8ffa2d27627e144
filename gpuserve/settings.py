"""The settings of a server as a whole: one frozen class that the CLI, the config file and ``Server``
all come to, and that the supervisor hands to the front. The models are not in it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

#: What the front and the supervisor call the trace settings that clients have changed.
TRACE: Final = "trace"
#: The transports.
NATIVE: Final = "native"
H2CORN: Final = "h2corn"
GRPCIO: Final = "grpcio"
#: What ``grpc_response_compression`` says where there is none.
NO_COMPRESSION: Final = "none"
GRPC_COMPRESSIONS: Final = (NO_COMPRESSION, "low", "medium", "high")


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """How requests are traced from the start on; clients may change the first four while the server runs.

    ``mode`` "triton" writes JSON into ``file``, "opentelemetry" sends spans to ``url`` (OTLP over HTTP).
    """

    #: Any of "TIMESTAMPS" and "TENSORS"; empty is off.
    level: tuple[str, ...] = ()
    #: One in so many requests is traced, and so many in all; -1 is without end.
    rate: int = 1000
    count: int = -1
    #: Traces a file; 0 is one file for all.
    log_frequency: int = 0
    file: str = ""
    mode: str = "triton"
    url: str = "http://localhost:4318/v1/traces"
    #: Attributes of the OpenTelemetry resource.
    resource: dict[str, str] = field(default_factory=lambda: {"service.name": "gpuserve"})


#: The header that carries an access token unless a rule names another.
TOKEN_HEADER: Final = "triton-access-token"


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A token that opens groups of endpoints, which are closed without one.

    Clients show it as ``Authorization: Bearer …``, or as the value of ``header``, which over gRPC has
    "triton-grpc-protocol-" before it.
    """

    groups: tuple[str, ...]
    token: str = field(repr=False)  # what is printed may be logged
    header: str = TOKEN_HEADER


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything a server is told besides its models. Ports 0 pick a free one; None switches it off."""

    host: str = "0.0.0.0"
    http_port: int | None = 8000
    grpc_port: int | None = 8001
    metrics_port: int | None = 8002
    #: Answers health and nothing else, without TLS and without a token, whatever the other ports want.
    health_port: int | None = None
    #: "native": our own server, both protocols on every port; so does "h2corn". "grpcio": the gRPC port is
    #: served by grpc.aio.
    transport: str = NATIVE
    #: What ``ServerMetadata`` says; tritonclient's own examples insist on "triton".
    name: str = "triton"
    #: After SIGTERM the queue is finished within this time, then requests are refused.
    drain_timeout_s: float = 30.0
    #: After SIGTERM the server says that it is not ready, but goes on as before for so long: until those who
    #: send requests have heard of it. Then the drain begins.
    lame_duck_s: float = 0.0
    #: A connection of this age, give or take 10 %, takes no more requests, and is closed after those that it
    #: has: clients connect anew, and find servers that were not there before. 0 is for ever.
    max_connection_age_s: float = 0.0
    #: How long a callable may take to load before the start counts as failed; 0 is for ever.
    load_timeout_s: float = 0.0
    #: The largest request body that is taken.
    max_request_nbytes: int = 4 << 30
    #: Shared memory that the inputs of one model may take at any time.
    max_arena_nbytes: int = 8 << 30
    #: Users, by their uid, whose system shared memory clients may register, besides the server's own.
    shared_memory_owners: tuple[int, ...] = ()
    #: Memory for the answers of models with a response cache; 0 switches all of them off.
    response_cache_nbytes: int = 0
    #: Request headers whose name this regular expression is found in, by protocol, reach the callable as
    #: parameters of the request; "" forwards none.
    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""
    #: PEM files of the certificate chain and its key: TLS on ``tls_ports``; None leaves it off.
    tls_certfile: str | None = None
    tls_keyfile: str | None = None
    #: PEM file of the authorities that a client's own certificate must come from; None asks for none.
    tls_client_ca: str | None = None
    #: The ports that speak TLS, and nothing else.
    tls_ports: tuple[str, ...] = ("http", "grpc", "metrics")
    #: Groups of endpoints that need ``access_token``: one rule, written shortly.
    restricted_endpoints: tuple[str, ...] = ()
    access_token: str | None = field(default=None, repr=False)  # what is printed may be logged
    #: Which tokens open which groups. A group of several rules is opened by the token of any.
    access_rules: tuple[AccessRule, ...] = ()
    #: Groups whose control operations clients on other machines may ask for without a token.
    remote_control: tuple[str, ...] = ()
    #: Whether operators may ask over HTTP what ``gpuserve status``, ``drain``, ``reload`` and so on ask.
    admin_api: bool = False
    #: Whether other programs of this user on this machine may serve their models through this server.
    attachable: bool = True
    #: "explicit": clients may load and unload models. "none": they may not.
    model_control: str = "none"
    #: With "explicit": the models that are loaded at the start; None is all of them.
    load_at_start: tuple[str, ...] | None = None
    #: "execution_count": an instance runs only while it has the resources that it declares; "off": always.
    rate_limit: str = "off"
    #: How much there is of resources, as "name:count" or "name:count:device"; of others, what is needed most.
    rate_limit_resources: tuple[str, ...] = ()
    #: Whether worker processes of a GPU keep to the CPUs and the memory that are next to it.
    numa_affinity: bool = True
    #: The server is ready only while so many of the GPUs that its models name can be used, or all of them
    #: where they are fewer.
    min_healthy_devices: int = 1
    #: The server is ready only while so many instances of each of its models are up, or all of them where a
    #: model has fewer.
    min_ready_instances: int = 1
    #: From one reading of the GPUs' state to the next; 0 reads none.
    gpu_health_interval_s: float = 1.0
    #: Whether the metrics page has quantiles of the latencies, which takes work for each request.
    metrics_summaries: bool = False
    #: How hard inference responses over gRPC are compressed: "none", "low", "medium", "high".
    grpc_response_compression: str = NO_COMPRESSION
    log_format: str = "text"
    log_level: str = "info"
    trace: TraceSettings = field(default_factory=TraceSettings)

    def to_wire(self) -> dict[str, Any]:
        """The settings as plain data for the front process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> ServerSettings:
        """The settings that ``to_wire`` said."""
        rules = (AccessRule(**{**one, "groups": tuple(one["groups"])}) for one in wire["access_rules"])
        return cls(**{**wire, "trace": TraceSettings(**wire["trace"]), "access_rules": tuple(rules)})
