"""Requests over HTTP/1.1, by aiohttp, over connections that are kept."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from random import Random
from typing import Any

import aiohttp
import aiohttp.abc

from benchmarks.rollout.endpoints import Endpoint
from benchmarks.rollout.load import Transient, Wrong
from benchmarks.rollout.outcomes import Kind, Way
from benchmarks.rollout.served_requests import PAUSE_S, parts, value


class NewConnections(aiohttp.abc.AbstractResolver):  # type: ignore[misc]  # untyped here
    """Says where a new connection to the Service goes, as kube-proxy does: to any endpoint that it knows of.

    Connections that exist stay where they are.
    """

    def __init__(self, random: Random) -> None:
        self._endpoints: Sequence[Endpoint] = ()
        self._random = random

    def take(self, endpoints: Sequence[Endpoint]) -> None:
        """What it knows from now on; see ``endpoints.Consumer``."""
        self._endpoints = endpoints

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        if not self._endpoints:
            raise OSError("no pod is ready")
        address = self._random.choice(self._endpoints).address
        return [
            aiohttp.abc.ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        pass


def service_session(service: NewConnections) -> aiohttp.ClientSession:
    """To the Service: new connections go where ``service`` says."""
    pool = aiohttp.TCPConnector(limit=0, resolver=service, use_dns_cache=False)
    return aiohttp.ClientSession(connector=pool)


def proxied_session() -> aiohttp.ClientSession:
    """To a proxy, which balances and repeats."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


class HttpClient:
    """See ``load.Client``; ``session`` is closed with it. ``url`` is that of the Service or of a proxy."""

    def __init__(self, kind: Kind, way: Way, session: aiohttp.ClientSession, url: str) -> None:
        self.kind = kind
        self.way = way
        self._session = session
        self._url = url

    async def ask(self, number: int) -> int:
        if self.kind is Kind.HTTP_INFER:
            return await self._infer(number)
        return await self._generate_stream(number)

    async def close(self) -> None:
        await self._session.close()

    async def _infer(self, number: int) -> int:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value(number)]}
        text, n_sent = await self._post("/v2/models/double/infer", {"inputs": [tensor]})
        got = json.loads(text)["outputs"][0]["data"]
        _check(got, [2 * value(number)])
        return n_sent

    async def _generate_stream(self, number: int) -> int:
        body = {"x": [value(number)], "pause_s": [PAUSE_S]}
        text, n_sent = await self._post("/v2/models/count/generate_stream", body)
        events = [line.removeprefix(b"data: ") for line in text.split(b"\n") if line]
        _check([_only(json.loads(event)) for event in events], parts(number))
        return n_sent

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[bytes, int]:
        text = b""
        try:
            async with self._session.post(self._url + path, json=body) as response:
                async for chunk, _ in response.content.iter_chunks():
                    text += chunk
        except (aiohttp.ClientError, OSError) as error:
            raise Transient(f"{type(error).__name__} after {len(text)} bytes: {error}") from None
        if response.status != 200:
            why = f"{response.status} {text[:200]!r}"
            raise Transient(why) if response.status == 503 else Wrong(why)
        return text, int(response.headers.get("x-envoy-attempt-count", 1))


def _only(event: dict[str, Any]) -> float:
    if "error" in event:
        raise Wrong(str(event["error"]))
    found = event["y"]
    return float(found[0] if isinstance(found, list) else found)


def _check(got: list[float], expected: list[float]) -> None:
    if got != expected:
        raise Wrong(f"expected {expected}, got {got}")
