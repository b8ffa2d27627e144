"""The ``server`` mapping of a config file: one field a key, with its default and its description.

The flags of ``gpuserve serve`` are made from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpuserve.config.fields import AccessToken, EndpointGroup, Entry, HeaderPattern, Port
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
    transport: Literal["h2corn", "grpcio"] = Field(
        default=_DEFAULTS.transport,  # type: ignore[arg-type]  # the default is one of the two words
        description="h2corn serves both protocols on both ports; with grpcio, grpc.aio has the gRPC port.",
    )
    name: str = Field(
        default=_DEFAULTS.name, min_length=1, description="What the server's metadata gives as its name."
    )
    drain_timeout_s: float = Field(
        default=_DEFAULTS.drain_timeout_s,
        ge=0,
        description="Seconds that queued requests have after SIGTERM.",
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
    restricted_endpoints: tuple[EndpointGroup, ...] = Field(
        default=_DEFAULTS.restricted_endpoints,  # type: ignore[arg-type]  # the default is empty
        strict=False,
        description="Groups of endpoints that need access_token in the header triton-access-token.",
    )
    access_token: AccessToken | None = Field(
        default=_DEFAULTS.access_token, repr=False, description="The token for the restricted endpoints."
    )
    attachable: bool = Field(
        default=_DEFAULTS.attachable,
        description="Whether other programs of this user on this machine may serve models through it.",
    )
    log_format: Literal["text", "json"] = Field(
        default=_DEFAULTS.log_format,  # type: ignore[arg-type]  # as above
        description="Form of the log lines, output of the models included.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default=_DEFAULTS.log_level,  # type: ignore[arg-type]  # as above
        description="Least severe level that is logged.",
    )
