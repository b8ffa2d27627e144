"""The settings of a server as keyword arguments of ``Server(…)``, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

from gpuserve.config.settings.server import LogOptions, MemoryBudget, TraceSettings
from gpuserve.config.settings.values import AccessRule, ControlGroup, EndpointGroup

#: A number of seconds, or a text such as "10s" or "2m".
Seconds: TypeAlias = float | str
#: A number of bytes, or a text such as "500MB" or "20GiB".
Bytes: TypeAlias = int | str


class ServerKeywords(TypedDict, total=False):
    """The keys of ``server``, which docs/reference.md describes."""

    host: str
    http_port: int | None
    grpc_port: int | None
    metrics_port: int | None
    health_port: int | None
    grpc_host: str | None
    metrics_host: str | None
    transport: Literal["native", "grpcio"]
    ingress_processes: int | Literal["auto"]
    name: str
    compat_name: Literal["triton"] | None
    drain_timeout_s: Seconds
    lame_duck_s: Seconds | None
    max_connection_age_s: Seconds
    max_connections: int
    max_connections_per_address: int
    max_streams: int
    max_half_requests: int
    head_timeout_s: Seconds
    idle_timeout_s: Seconds
    body_grace_s: Seconds
    min_body_rate: int
    answer_grace_s: Seconds
    min_answer_rate: int
    max_unsent_nbytes: Bytes
    max_requests_per_s: int | None
    max_request_burst: int | None
    load_timeout_s: Seconds
    hang_timeout_s: Seconds
    max_request_nbytes: Bytes
    max_arena_nbytes: Bytes
    max_intake_nbytes: Bytes
    max_inflated_nbytes: Bytes
    max_inflation_ratio: int
    shared_memory_owners: Sequence[int]
    shared_memory_locked_nbytes: Bytes
    gpu_locked_nbytes: Bytes
    memory: MemoryBudget
    response_cache_nbytes: Bytes
    http_header_forward_pattern: str
    grpc_header_forward_pattern: str
    grpc_response_compression: Literal["none", "low", "medium", "high"]
    tls_certfile: str | None
    tls_keyfile: str | None
    tls_client_ca: str | None
    tls_ports: Sequence[Literal["http", "grpc", "metrics"]]
    restricted_endpoints: Sequence[EndpointGroup]
    access_token: str | None
    access_rules: Sequence[AccessRule]
    remote_control: Sequence[ControlGroup]
    allowed_hosts: Sequence[str]
    cors_origins: Sequence[str]
    admin_api: bool
    dashboard: Literal["local", "on", "off"]
    attachable: bool
    require_control: bool
    model_control: Literal["none", "explicit", "poll"]
    repository_poll_s: Seconds
    load_at_start: Sequence[str] | None
    exit_on_error: bool
    rate_limit: Literal["off", "execution_count"]
    rate_limit_resources: Sequence[str]
    numa_affinity: bool
    mps: Literal["auto", "on", "off"]
    min_healthy_devices: int
    min_ready_instances: int
    gpu_health_interval_s: Seconds
    metrics_summaries: bool
    log_format: Literal["text", "json"]
    log_level: Literal["debug", "info", "warning", "error"]
    log: LogOptions
    access_log: Literal["off", "errors", "all"]
    max_output_lines_per_s: int
    max_output_nbytes_per_s: int
    trace: TraceSettings
