"""Which requests are answered without ASGI: inference that needs nothing special, while nobody looks on."""

from __future__ import annotations

from gpuserve.front.endpoint.asgi import Doors
from gpuserve.front.endpoint.grpc_direct import GrpcDirectDoor
from gpuserve.front.endpoint.http_direct import HttpDirectDoor
from gpuserve.front.server.exchange import Exchange, Sink


class DirectDoors:
    """The direct doors beside ``doors``; None where a door's answers all need ASGI."""

    def __init__(self, doors: Doors, grpc: GrpcDirectDoor | None, http: HttpDirectDoor | None) -> None:
        self._doors = doors
        self._grpc = grpc
        self._http = http

    def __call__(self, exchange: Exchange) -> Sink | None:
        """The sink of a request, or None: it goes to the application."""
        door = self._grpc if exchange.head.http_version == "2" else self._http
        return None if door is None or self._doors.wrapped else door(exchange)
