"""The settings of a server as a whole: one frozen class that the CLI, the config file and ``Server``
all come to, and that the supervisor hands to the front. The models are not in it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything a server is told besides its models. Ports 0 pick a free one; None switches it off."""

    host: str = "0.0.0.0"
    http_port: int | None = 8000
    grpc_port: int | None = 8001
    metrics_port: int | None = 8002
    #: "h2corn": both protocols on every port. "grpcio": the gRPC port is served by grpc.aio.
    transport: str = "h2corn"
    #: What ``ServerMetadata`` says; tritonclient's own examples insist on "triton".
    name: str = "triton"
    #: After SIGTERM the queue is finished within this time, then requests are refused.
    drain_timeout_s: float = 30.0
    #: How long a callable may take to load before the start counts as failed; 0 is for ever.
    load_timeout_s: float = 0.0
    #: The largest request body that is taken.
    max_request_nbytes: int = 4 << 30
    #: Shared memory that the inputs of one model may take at any time.
    max_arena_nbytes: int = 8 << 30
    #: Memory for the answers of models with a response cache; 0 switches all of them off.
    response_cache_nbytes: int = 0
    #: Request headers whose name this regular expression is found in, by protocol, reach the callable as
    #: parameters of the request; "" forwards none.
    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""
    #: Groups of endpoints that need ``access_token`` in the header "triton-access-token".
    restricted_endpoints: tuple[str, ...] = ()
    access_token: str | None = field(default=None, repr=False)  # what is printed may be logged
    #: Whether other programs of this user on this machine may serve their models through this server.
    attachable: bool = True
    log_format: str = "text"
    log_level: str = "info"

    def to_wire(self) -> dict[str, Any]:
        """The settings as plain data for the front process."""
        return dataclasses.asdict(self)
