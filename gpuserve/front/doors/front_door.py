"""The front door: which door a request goes to, so that either port answers both protocols."""

from __future__ import annotations

from gpuserve.front.doors.grpc.door import GrpcDoor
from gpuserve.front.doors.http.door import HttpDoor
from gpuserve.front.exchange.exchange import Accept, Exchange, Sink


class FrontDoor:
    """Both doors. The port of the metrics has little else: it is often reachable from further away."""

    def __init__(self, grpc: GrpcDoor, http: HttpDoor) -> None:
        self._grpc = grpc.accept
        self._http = http.accept

    def accept(self, exchange: Exchange) -> Sink:
        """The sink of a request; gRPC is told by the content type, as its specification wants it."""
        head = exchange.head
        if not head.is_grpc:
            return self._http(exchange)
        way: Accept | None = head.memo  # known from an equal head: nearly every call
        return self._grpc(exchange) if way is None else way(exchange)
