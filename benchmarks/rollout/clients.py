"""The clients of the load: every kind of request, balanced by the client itself or by Envoy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from benchmarks.rollout.endpoints import Endpoints
from benchmarks.rollout.grpc_client import StreamClient, UnaryClient, balancing_channel, proxied_channel
from benchmarks.rollout.http_client import HttpClient, NewConnections, proxied_session, service_session
from benchmarks.rollout.load import Client
from benchmarks.rollout.outcomes import Kind, Way


def direct(
    addresses: Sequence[str], http_port: int, grpc_port: int, endpoints: Endpoints, random: Random
) -> list[Client]:
    """Without a proxy. gRPC: ``round_robin`` over all addresses there are. HTTP: kept connections, each to a
    pod that was in the endpoint list when it was made.
    """
    service, url = NewConnections(random), f"http://service:{http_port}"
    endpoints.subscribe(service.take)
    where = [f"{address}:{grpc_port}" for address in addresses]
    return [
        UnaryClient(Way.DIRECT, balancing_channel(where)),
        HttpClient(Kind.HTTP_INFER, Way.DIRECT, service_session(service), url),
        StreamClient(Way.DIRECT, balancing_channel(where)),
        HttpClient(Kind.HTTP_STREAM, Way.DIRECT, service_session(service), url),
    ]


def through_envoy(address: str, http_port: int, grpc_port: int) -> list[Client]:
    """To the ports of an Envoy, which balances and repeats."""
    where, url = f"{address}:{grpc_port}", f"http://{address}:{http_port}"
    return [
        UnaryClient(Way.ENVOY, proxied_channel(where)),
        HttpClient(Kind.HTTP_INFER, Way.ENVOY, proxied_session(), url),
        StreamClient(Way.ENVOY, proxied_channel(where)),
        HttpClient(Kind.HTTP_STREAM, Way.ENVOY, proxied_session(), url),
    ]
