"""The ``server`` mapping of a config file: one field a key, with its default and its description.

The flags of ``gpuserve serve`` are made from it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gpuserve.config.access_entry import AccessRuleEntry, AccessToken, ControlGroup
from gpuserve.config.fields import EndpointGroup, Entry, HeaderPattern, Port, RateResource
from gpuserve.config.trace_entry import TraceEntry
from gpuserve.settings import ServerSettings

_DEFAULTS = ServerSettings()


class ServerEntry(Entry):
    """The server as a whole."""

    host: str = Field(default=_DEFAULTS.host, min_length=1, description="Address to listen on.")
    http_port: Port | None = Field(
        default=_DEFAULTS.http_port, description="Port of HTTP; 0 picks a free one, null switches it off."
    )
    grpc_port: Port | None = Field(
        default=_DEFAULTS.grpc_port, description="Port of gRPC; 0 picks a free one, null switches it off."
    )
    metrics_port: Port | None = Field(
        default=_DEFAULTS.metrics_port,
        description="Port of /metrics; 0 picks a free one, null switches it off.",
    )
    health_port: Port | None = Field(
        default=_DEFAULTS.health_port,
        description="Port of health alone, never with TLS; 0 picks a free one, null switches it off.",
    )
    transport: Literal["native", "h2corn", "grpcio"] = Field(
        default=_DEFAULTS.transport,  # type: ignore[arg-type]  # the default is one of the words
        description="native, the server's own, and h2corn serve both protocols on both ports; "
        "with grpcio, grpc.aio has the gRPC port.",
    )
    name: str = Field(
        default=_DEFAULTS.name, min_length=1, description="What the server's metadata gives as its name."
    )
    drain_timeout_s: float = Field(
        default=_DEFAULTS.drain_timeout_s,
        ge=0,
        description="Seconds that queued requests have after SIGTERM.",
    )
    lame_duck_s: float = Field(
        default=_DEFAULTS.lame_duck_s,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that requests are still taken after SIGTERM, while the server is not ready.",
    )
    max_connection_age_s: float = Field(
        default=_DEFAULTS.max_connection_age_s,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after which a connection takes no more requests, give or take 10 %; "
        "0 is no limit.",
    )
    load_timeout_s: float = Field(
        default=_DEFAULTS.load_timeout_s,
        ge=0,
        description="Seconds that a model may take to load; 0 is no limit.",
    )
    max_request_nbytes: int = Field(
        default=_DEFAULTS.max_request_nbytes, gt=0, description="Largest request that is accepted, in bytes."
    )
    max_arena_nbytes: int = Field(
        default=_DEFAULTS.max_arena_nbytes,
        gt=0,
        description="Shared memory that a model's inputs may take, in bytes.",
    )
    shared_memory_owners: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=_DEFAULTS.shared_memory_owners,
        strict=False,
        description="Users (uid) whose system shared memory clients may register, besides the server's own.",
    )
    response_cache_nbytes: int = Field(
        default=_DEFAULTS.response_cache_nbytes,
        ge=0,
        description="Memory for the answers of models with response_cache, in bytes; 0 switches it off.",
    )
    http_header_forward_pattern: HeaderPattern = Field(
        default=_DEFAULTS.http_header_forward_pattern,
        description="HTTP headers that this regular expression is found in reach Request.parameters.",
    )
    grpc_header_forward_pattern: HeaderPattern = Field(
        default=_DEFAULTS.grpc_header_forward_pattern,
        description="gRPC metadata that this regular expression is found in reach Request.parameters.",
    )
    grpc_response_compression: Literal["none", "low", "medium", "high"] = Field(
        default=_DEFAULTS.grpc_response_compression,  # type: ignore[arg-type]  # as above
        description="How hard responses over gRPC are compressed, for clients that can read it.",
    )
    tls_certfile: str | None = Field(
        default=_DEFAULTS.tls_certfile, min_length=1, description="Certificate chain of TLS, a PEM file."
    )
    tls_keyfile: str | None = Field(
        default=_DEFAULTS.tls_keyfile, min_length=1, description="Key of the certificate, a PEM file."
    )
    tls_client_ca: str | None = Field(
        default=_DEFAULTS.tls_client_ca,
        min_length=1,
        description="Authorities that clients' certificates must come from, a PEM file; null asks for none.",
    )
    tls_ports: tuple[Literal["http", "grpc", "metrics"], ...] = Field(
        default=_DEFAULTS.tls_ports,  # type: ignore[arg-type]  # the default is all three
        strict=False,
        description="The ports that speak TLS, where there is a certificate.",
    )
    restricted_endpoints: tuple[EndpointGroup, ...] = Field(
        default=_DEFAULTS.restricted_endpoints,  # type: ignore[arg-type]  # the default is empty
        strict=False,
        description="Groups of endpoints that need access_token.",
    )
    access_token: AccessToken | None = Field(
        default=_DEFAULTS.access_token, repr=False, description="The token for the restricted endpoints."
    )
    access_rules: tuple[AccessRuleEntry, ...] = Field(
        default=(), strict=False, repr=False, description="Which tokens open which groups of endpoints."
    )
    remote_control: tuple[ControlGroup, ...] = Field(
        default=_DEFAULTS.remote_control,  # type: ignore[arg-type]  # as above
        strict=False,
        description="Groups whose control operations clients on other machines may ask for without a token.",
    )
    admin_api: bool = Field(
        default=_DEFAULTS.admin_api,
        description="Whether operators may see and control the server over HTTP, by /v2/admin/….",
    )
    attachable: bool = Field(
        default=_DEFAULTS.attachable,
        description="Whether other programs of this user on this machine may serve models through it.",
    )
    rate_limit: Literal["off", "execution_count"] = Field(
        default=_DEFAULTS.rate_limit,  # type: ignore[arg-type]  # as above
        description="execution_count: an instance runs only while it has the resources that it declares.",
    )
    rate_limit_resources: tuple[RateResource, ...] = Field(
        default=_DEFAULTS.rate_limit_resources,
        strict=False,
        description="How much there is of resources: name:count, or name:count:device for one device.",
    )
    numa_affinity: bool = Field(
        default=_DEFAULTS.numa_affinity,
        description="Whether workers of a GPU keep to the CPUs and the memory that are next to it.",
    )
    min_healthy_devices: int = Field(
        default=_DEFAULTS.min_healthy_devices,
        ge=0,
        description="The server is ready while so many of the GPUs that its models name are not lost.",
    )
    min_ready_instances: int = Field(
        default=_DEFAULTS.min_ready_instances,
        ge=0,
        description="The server is ready while so many instances of each model are up.",
    )
    gpu_health_interval_s: float = Field(
        default=_DEFAULTS.gpu_health_interval_s,
        ge=0,
        description="Seconds from one reading of the GPUs' state to the next; 0 reads none.",
    )
    metrics_summaries: bool = Field(
        default=_DEFAULTS.metrics_summaries,
        description="Whether /metrics has quantiles of the latencies of the last minute.",
    )
    model_control: Literal["none", "explicit"] = Field(
        default=_DEFAULTS.model_control,  # type: ignore[arg-type]  # as above
        description="Whether clients may load and unload models (explicit).",
    )
    load_at_start: tuple[str, ...] | None = Field(
        default=_DEFAULTS.load_at_start,
        strict=False,
        description="With model_control explicit: names of the models to load at the start; null is all.",
    )
    log_format: Literal["text", "json"] = Field(
        default=_DEFAULTS.log_format,  # type: ignore[arg-type]  # as above
        description="Form of the log lines, output of the models included.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default=_DEFAULTS.log_level,  # type: ignore[arg-type]  # as above
        description="Least severe level that is logged.",
    )
    trace: TraceEntry = Field(default_factory=TraceEntry, description="Tracing of requests.")
