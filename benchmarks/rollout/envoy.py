"""The real Envoy in front of the pods, with the configuration that ``gpuserve export envoy`` writes.

Only the places differ: it listens on this machine, and its endpoints come from files, which follow the
endpoint list, in place of DNS.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.rollout.endpoints import Endpoint
from gpuserve.config.load import load_file
from gpuserve.export.envoy import bootstrap
from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.manifests.yaml_text import render
from gpuserve.export.sizing.options import ExportOptions

_LAUNCHER: Final = Path(__file__).with_name("container.py")
_PROGRAM: Final = Path(sys.executable).with_name("envoy")
_ADDRESS: Final = "127.0.0.1"
_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.05


class EnvoyFailed(Exception):
    """Envoy did not start, or ended; its log says why."""


class Envoy:
    """One Envoy. ``config`` is the file that the pods serve; ``listen_ports``: by "http" and "grpc"."""

    def __init__(
        self, config: Path, name: str, folder: Path, listen_ports: Mapping[str, int], admin_port: int
    ) -> None:
        self.address = _ADDRESS
        self.log = folder / "envoy.log"
        self._folder = folder
        self._admin = f"http://{_ADDRESS}:{admin_port}"
        self._versions = itertools.count(1)
        self._proxy = replace(
            Proxy.of(load_file(str(config), {}), ExportOptions(name=name)),
            listen_ports=dict(listen_ports),
            endpoints_folder=str(folder / "endpoints"),
            folder=str(folder),
            address=_ADDRESS,
            admin_port=admin_port,
            status_port=None,
        )

    def take(self, known: Sequence[Endpoint]) -> None:
        """The endpoints as it is to know them from now on; see ``endpoints.Consumer``."""
        version = str(next(self._versions))
        folder = Path(self._proxy.endpoints_folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in self._proxy.clusters:
            document = bootstrap.endpoints(self._proxy, name, [one.address for one in known], version)
            fresh = folder.parent / f"{name}.new"
            fresh.write_text(render([document]))
            fresh.rename(folder / f"{name}.yaml")  # Envoy looks when a file is moved

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Envoy]:
        """It takes requests in the block. ``take`` was called before.

        Raises:
            EnvoyFailed: it ended, or is not ready in time; its log says why.
        """
        for name, text in bootstrap.files(self._proxy).items():
            (self._folder / name).write_text(text)
        process = await self._start()
        try:
            await self._until_ready(process)
            yield self
            if process.returncode is not None:
                raise EnvoyFailed(f"Envoy ended with {process.returncode}: {self.log}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def counters(self, name: str) -> dict[str, int]:
        """Its counters with this in their names, such as "upstream_rq_retry", that are not 0."""
        found = json.loads(await self._get(f"/stats?format=json&usedonly&filter={name}"))["stats"]
        return {one["name"]: one["value"] for one in found if one.get("value")}

    async def _start(self) -> asyncio.subprocess.Process:
        launcher = (sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()))
        config = ("-c", str(self._folder / bootstrap.FILE), "--concurrency", "2", "--disable-hot-restart")
        with self.log.open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *launcher, str(_PROGRAM), *config, "-l", "warning",
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not await self._is_ready():
                    if process.returncode is not None:
                        break
                    await asyncio.sleep(_POLL_S)
                else:
                    return
        except TimeoutError:
            pass
        raise EnvoyFailed(f"Envoy is not ready: {self.log.read_text()[-2000:]}")

    async def _is_ready(self) -> bool:
        try:
            return (await self._get("/ready")).startswith(b"LIVE")
        except OSError:
            return False

    async def _get(self, path: str) -> bytes:
        return await asyncio.to_thread(_fetched, self._admin + path)


def _fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        body: bytes = answer.read()
        return body
