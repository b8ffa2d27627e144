"""Asks what a probe asks, each time by a new connection, as a kubelet does. Results go to ``probes.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from benchmarks.rollout.probes import Action, ExecAction, GrpcAction, HttpAction, TcpAction

_CHECK: Final = "/grpc.health.v1.Health/Check"
#: HealthCheckResponse{status: SERVING}
_SERVING: Final = b"\x08\x01"
_OPTIONS: Final = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask: the pod's address, and for commands its folder and environment."""

    address: str
    folder: Path
    environment: Mapping[str, str]


async def is_good(action: Action, target: Target, timeout_s: float) -> bool:
    """Whether the answer came in time and was good."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(action, target)
    except (TimeoutError, OSError, EOFError, ValueError, grpc.aio.AioRpcError):
        return False


async def _ask(action: Action, target: Target) -> bool:
    match action:
        case GrpcAction(port, service):
            return await _grpc_serving(f"{target.address}:{port}", service)
        case HttpAction(port, path):
            return 200 <= await _http_status(target.address, port, path) < 400
        case TcpAction(port):
            _, writer = await asyncio.open_connection(target.address, port)
            writer.close()
            return True
        case ExecAction(command):
            return await _exit_status(command, target) == 0


async def _grpc_serving(address: str, service: str) -> bool:
    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    async with grpc.aio.insecure_channel(f"ipv4:{address}", options=_OPTIONS) as channel:
        check = channel.unary_unary(_CHECK)  # bytes in, bytes out
        return bytes(await check(request)) == _SERVING


async def _http_status(address: str, port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: {address}:{port}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        line = await reader.readline()
        return int(line.split()[1]) if line.startswith(b"HTTP/1.") else 0
    finally:
        writer.close()


async def _exit_status(command: tuple[str, ...], target: Target) -> int:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=target.folder,
        env=dict(target.environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
