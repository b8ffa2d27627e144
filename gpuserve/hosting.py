"""A server whose front lives in the event loop of its caller; supervisor and workers are as always.

Nothing of ASGI is here: ``gpuserve/asgi.py`` says when a server begins and ends, and who may ask it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuserve.errors import GpuserveError
from gpuserve.front.front import Front
from gpuserve.supervisor.hosted_front import HostedFront, start_in
from gpuserve.supervisor.observer import SilentObserver
from gpuserve.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.repository import FileRepository
    from gpuserve.devices.server_devices import ServerDevices
    from gpuserve.front.endpoint.asgi import Application
    from gpuserve.settings import ServerSettings

logger = logging.getLogger(__name__)

_PRELOADED: Final = re.compile(r"[ :]+")


class _HostedConfig:
    """The config file, but for what is the host's to say. See ``supervisor.repository.ConfigSource``."""

    def __init__(self, repository: FileRepository) -> None:
        self._repository = repository
        self.path = repository.path
        self.start = _hosted(repository.start)

    def read_all(self) -> Configuration:
        """What it says now."""
        return _hosted(self._repository.read_all())


def _hosted(configuration: Configuration) -> Configuration:
    """With settings that go by the host."""
    settings = dataclasses.replace(
        configuration.settings,
        # The ports are the host's, and so are the transport and the connections.
        http_port=None,
        grpc_port=None,
        metrics_port=None,
        health_port=None,
        transport="native",
        max_connection_age_s=0.0,
        lame_duck_s=0.0,  # the host has stopped taking requests before it stops us
    )
    return dataclasses.replace(configuration, settings=settings)


class HostedServer:
    """One run of a server, to be started and stopped in the event loop that its front is to live in."""

    def __init__(
        self,
        configuration: Configuration,
        repository: FileRepository | None = None,
        devices: ServerDevices | None = None,
    ) -> None:
        self._settings = _hosted(configuration).settings
        self._models = configuration.models
        self._repository = repository
        self._devices = devices
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._front: Front | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def application(self) -> Application | None:
        """The endpoint; None before ``start()``, after the end, and for a moment between two fronts."""
        return None if self._front is None else self._front.application

    async def start(self) -> None:
        """Return when every model is loaded. Cancelled, it lets nothing run on.

        Raises:
            StartupError: a model could not be loaded; nothing is left running.
        """
        self._loop = loop = asyncio.get_running_loop()
        decided = asyncio.Event()
        supervisor = Supervisor(
            self._settings,
            self._models,
            SilentObserver(),
            relay_output=True,
            start_front=start_in(self._host),
            repository=self._repository,
            devices=self._devices,
            config=None if self._repository is None else _HostedConfig(self._repository),
        )
        # Not wrap_future(): a cancellation of ours must not reach a future that the supervisor resolves.
        supervisor.started.add_done_callback(lambda _: loop.call_soon_threadsafe(decided.set))
        # Workers are tied to this very thread by the parent-death signal; a daemon ends with the program.
        self._thread = threading.Thread(
            target=_supervise, args=(supervisor,), name="gpuserve-supervisor", daemon=True
        )
        self._supervisor = supervisor
        self._thread.start()
        try:
            await decided.wait()
            supervisor.started.result()
        except BaseException:
            supervisor.request_stop(fast=True)
            raise

    async def stop(self) -> None:
        """Finish what is queued and end the workers."""
        if self._supervisor is not None and self._thread is not None:
            self._supervisor.request_stop()
            await asyncio.to_thread(self._thread.join)

    def _host(self, control: socket.socket, hosted: HostedFront) -> None:
        """Called in the supervisor's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin, control, hosted)

    def _begin(self, control: socket.socket, hosted: HostedFront) -> None:
        front = Front(control, _keep_log, lambda: front.quit())  # noqa: PLW0108 - not bound yet
        self._front = front
        self._running = asyncio.get_running_loop().create_task(self._run(front, control, hosted))

    async def _run(self, front: Front, control: socket.socket, hosted: HostedFront) -> None:
        try:
            await front.run()
        except asyncio.CancelledError:  # the event loop ends, and no front can live here any more
            if self._supervisor is not None:
                self._supervisor.request_stop(fast=True)
            raise
        except Exception:  # a fault of ours; the supervisor starts another front
            logger.exception("the front failed")
        finally:
            if self._front is front:
                self._front = None
            control.close()
            hosted.ended()


def _supervise(supervisor: Supervisor) -> None:
    try:
        supervisor.run()
    except GpuserveError:
        pass  # start() raises it
    except Exception:  # a fault of ours: every process is ended, and requests are refused
        logger.exception("the server failed")


def _keep_log(_settings: ServerSettings) -> None:
    """The front shares its process, and so the log, with whoever started it."""


def leave_embedding(environ: MutableMapping[str, str]) -> None:
    """Let children be ordinary processes of the Python environment that this interpreter belongs to.

    One that is embedded, as in Envoy, was given variables that would lead an ordinary one astray, and
    has guessed its executable from ``PATH``, where another Python's may come first.
    """
    if os.path.realpath("/proc/self/exe") == os.path.realpath(sys.executable):
        return
    home = environ.pop("PYTHONHOME", "").partition(os.pathsep)[0]
    executable = Path(home, "bin", "python3")
    if home and executable.exists():
        sys.executable = str(executable)
    preloaded = _PRELOADED.split(environ.pop("LD_PRELOAD", ""))
    kept = [path for path in preloaded if path and not Path(path).name.startswith("libpython")]
    if kept:
        environ["LD_PRELOAD"] = os.pathsep.join(kept)
