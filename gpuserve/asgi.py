"""The endpoint as an ASGI application, for a server of your own choice: ``pyvoy gpuserve.asgi:app``.

The models are those of the config file that ``GPUSERVE_CONFIG`` names. They are started by the lifespan
of the ASGI server (or by the first request, where it has none) and ended by it. The front then lives in
the server's event loop and its ports are the server's; workers are processes as always.

One server process, with one event loop, hosts one application. gRPC needs HTTP/2 and response trailers.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import threading
import urllib.parse
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final

from gpuserve.errors import ConfigError, GpuserveError, StartupError

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.repository import FileRepository
    from gpuserve.front.endpoint.asgi import Application, Receive, Send
    from gpuserve.hosting import HostedServer

logger = logging.getLogger(__name__)

CONFIG_VARIABLE: Final = "GPUSERVE_CONFIG"
_OTHER_LOOP: Final = "gpuserve.asgi:app serves in one event loop: give this server one worker thread"
_DEFECT: Final = "internal error of the server; its log says more"


class Stage(enum.Enum):
    """Where the application stands. The values are what a request is told that finds it there."""

    NEW = "the server is not started"
    STARTING = "the server is starting"
    SERVING = "the server is starting again"
    FAILED = "the server could not be started"
    ENDED = "the server has been stopped"


TRANSITIONS: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.NEW: frozenset({Stage.STARTING}),
    Stage.STARTING: frozenset({Stage.SERVING, Stage.FAILED}),
    Stage.SERVING: frozenset({Stage.ENDED}),
    Stage.FAILED: frozenset({Stage.STARTING, Stage.ENDED}),
    Stage.ENDED: frozenset({Stage.STARTING}),
}
#: A loop serves, or will.
_CLAIMED: Final = frozenset({Stage.STARTING, Stage.SERVING})


class HostedApplication:
    """The ASGI application. Nothing happens before the first lifespan event or request."""

    def __init__(self) -> None:
        self.stage = Stage.NEW
        self._claiming = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._server: HostedServer | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve a lifespan, or one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if self.stage is Stage.NEW and self._claim():  # a server without lifespan
            self._begin()
        if self._loop is not asyncio.get_running_loop():
            await _refuse(send, _OTHER_LOOP if self.stage in _CLAIMED else self.stage.value)
            return
        if self.stage is Stage.STARTING and self._starting is not None:
            await asyncio.wait({self._starting})
        application = self._application()
        if application is None:
            await _refuse(send, self.stage.value)
        else:
            await application(_below_mount(scope), receive, send)

    async def stop(self) -> None:
        """Finish what is queued and end the workers; for hosts that have no lifespan to ask for it."""
        if self._server is not None:
            self._move(Stage.ENDED)
            await self._server.stop()
        self._server = None

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        steps = {"lifespan.startup": self._start, "lifespan.shutdown": self.stop}
        event = ""
        while event != "lifespan.shutdown":
            event = (await receive())["type"]
            try:
                await steps[event]()
            except GpuserveError as error:
                await send({"type": f"{event}.failed", "message": str(error)})
                return
            except Exception:  # a fault of ours; raised, it would read as "lifespan is not supported"
                logger.exception("%s failed", event)
                await send({"type": f"{event}.failed", "message": _DEFECT})
                return
            await send({"type": f"{event}.complete"})

    async def _start(self) -> None:
        if not self._claim():
            raise StartupError(_OTHER_LOOP)
        await self._begin()

    def _begin(self) -> asyncio.Task[None]:
        """The start is a task of its own: a request that gives up must not take it along."""
        self._starting = asyncio.get_running_loop().create_task(self._serve())
        self._starting.add_done_callback(_look_at)
        return self._starting

    async def _serve(self) -> None:
        """Load every model.

        Raises:
            ConfigError: the variable is not set, or the file is wrong.
            DeviceError: a device that this machine does not have.
            StartupError: a model could not be loaded; nothing is left running.
        """
        from gpuserve.cli.preflight import with_devices
        from gpuserve.devices.server_devices import ServerDevices
        from gpuserve.hosting import HostedServer, leave_embedding

        try:
            configuration = _configuration()
            leave_embedding(os.environ)
            devices = ServerDevices(numa_affinity=configuration.settings.numa_affinity)
            repository = _repository(configuration)
            configuration = with_devices(configuration, devices)
            self._server = HostedServer(configuration, repository, devices)
            await self._server.start()
        except BaseException as error:
            self._move(Stage.FAILED)
            shown = None if isinstance(error, GpuserveError) else error
            logger.critical("not started: %s", str(error) or type(error).__name__, exc_info=shown)
            raise
        self._move(Stage.SERVING)

    def _application(self) -> Application | None:
        if self.stage is not Stage.SERVING or self._server is None:
            return None
        return self._server.application

    def _claim(self) -> bool:
        """Be the event loop that serves, from the start that follows; false where there is one."""
        with self._claiming:  # several loops are several threads
            if self.stage in _CLAIMED:
                return False
            self._move(Stage.STARTING)
            self._loop = asyncio.get_running_loop()
            return True

    def _move(self, stage: Stage) -> None:
        if stage not in TRANSITIONS[self.stage]:
            raise RuntimeError(f"the application cannot go from {self.stage.name} to {stage.name}")
        self.stage = stage


def _look_at(starting: asyncio.Task[None]) -> None:
    """asyncio complains of a failure that nobody asked for; it is in the log already."""
    if not starting.cancelled():
        starting.exception()


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE}


def _repository(configuration: Configuration) -> FileRepository:
    """The same file, for clients that load models later on."""
    from gpuserve.config.repository import FileRepository

    return FileRepository(configuration.sources.name, _environ(), (), configuration)


def _configuration() -> Configuration:
    """What the CLI would serve: the same file, the same variables."""
    from gpuserve import logs
    from gpuserve.cli.preflight import require_trace_output
    from gpuserve.config.load import load_file

    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise ConfigError(f"{CONFIG_VARIABLE} is not set: it names the config file of the models to serve")
    configuration = load_file(path, _environ())
    if configuration.settings.tls_certfile is not None:
        raise ConfigError("tls_certfile does nothing here: TLS is for the ASGI server to speak; leave it out")
    require_trace_output(configuration)
    if not logging.getLogger(logs.ROOT).hasHandlers():  # else the host has its own way
        logs.configure(configuration.settings.log_format, configuration.settings.log_level)
    return configuration


def _below_mount(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """The scope with the paths of the endpoint; in ASGI they begin with where it is mounted."""
    inner = dict(scope)
    mount = inner.get("root_path", "").rstrip("/")
    if mount and inner["path"].startswith(f"{mount}/"):
        inner["path"] = inner["path"].removeprefix(mount)
        raw_path, raw_mount = inner.get("raw_path") or b"", urllib.parse.quote(mount).encode()
        # Written another way than we would: the endpoint then goes by "path".
        inner["raw_path"] = raw_path.removeprefix(raw_mount) if raw_path.startswith(raw_mount) else b""
    return inner


async def _refuse(send: Send, text: str) -> None:
    from gpuserve.front.endpoint.http_bodies import error_body, json_headers

    body = error_body(text)
    headers = [*json_headers(body), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


app = HostedApplication()
