"""The endpoint as an ASGI application, for a server of your own choice: ``pyvoy gpuserve.asgi:app``.

The models are those of the config file that ``GPUSERVE_CONFIG`` names. They are started by the lifespan
of the ASGI server (or by the first request, where it has none) and ended by it. The front then lives in
the server's event loop and its ports are the server's; workers are processes as always.

One server process, with one event loop, hosts one application. gRPC needs HTTP/2 and response trailers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuserve.errors import ConfigError, GpuserveError

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.front.endpoint.asgi import Receive, Send
    from gpuserve.front.front import Front
    from gpuserve.supervisor.hosted_front import HostedFront
    from gpuserve.supervisor.supervisor import Supervisor

logger = logging.getLogger(__name__)

CONFIG_VARIABLE: Final = "GPUSERVE_CONFIG"
#: Meant by an embedding server for the interpreter inside it; they would lead an ordinary one astray.
_EMBEDDING_VARIABLES: Final = ("PYTHONHOME", "LD_PRELOAD")
_NOT_READY: Final = b'{"error":"the server is not started"}'


class HostedApplication:
    """The ASGI application. Nothing happens before the first lifespan event or request."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Future[None] | None = None
        self._front: Front | None = None
        self._ended: asyncio.Task[None] | None = None
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve a lifespan, or one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if self._front is None and self._starting is None:
            await self.start()
        application = None if self._front is None else self._front.application
        if application is None or asyncio.get_running_loop() is not self._loop:
            await _refuse(send)
            return
        await application(dict(scope), receive, send)

    async def start(self) -> None:
        """Load every model.

        Raises:
            ConfigError: the variable is not set, or the file is wrong.
            StartupError: a model could not be loaded; nothing is left running.
        """
        from gpuserve.supervisor.hosted_front import start_in
        from gpuserve.supervisor.observer import SilentObserver
        from gpuserve.supervisor.supervisor import Supervisor

        self._loop = asyncio.get_running_loop()
        self._starting = self._loop.create_future()
        configuration = _configuration()
        _forget_embedding()
        settings = _without_ports(configuration)
        self._supervisor = Supervisor(
            settings,
            configuration.models,
            SilentObserver(),
            relay_output=False,
            start_front=start_in(self._host),
        )
        self._thread = threading.Thread(target=self._supervise, name="gpuserve-supervisor", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(self._supervisor.started)

    async def stop(self) -> None:
        """Finish what is queued and end the workers."""
        if self._supervisor is None or self._thread is None:
            return
        self._supervisor.request_stop()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._supervisor = self._thread = self._front = self._starting = None

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = (await receive())["type"]
            try:
                if event == "lifespan.startup":
                    await self.start()
                else:
                    await self.stop()
            except GpuserveError as error:
                await send({"type": f"{event}.failed", "message": str(error)})
                return
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    def _supervise(self) -> None:
        assert self._supervisor is not None
        try:
            self._supervisor.run()
        except GpuserveError:
            logger.debug("the server did not start", exc_info=True)  # start() raises the same

    def _host(self, control: socket.socket, hosted: HostedFront) -> None:
        """Called in the supervisor's thread; the front begins in the loop of the server."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin, control, hosted)

    def _begin(self, control: socket.socket, hosted: HostedFront) -> None:
        from gpuserve.front.front import Front

        front = Front(control, lambda _settings: None, self._lose)
        self._front = front
        self._ended = asyncio.get_running_loop().create_task(self._run(front, control, hosted))

    def _lose(self) -> None:
        """The supervisor is gone; requests are refused from now on."""
        front, self._front = self._front, None
        if front is not None:
            front.quit()

    async def _run(self, front: Front, control: socket.socket, hosted: HostedFront) -> None:
        try:
            await front.run()
        finally:
            control.close()
            hosted.ended()


def _configuration() -> Configuration:
    from gpuserve.config.load import load_file

    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise ConfigError(f"{CONFIG_VARIABLE} is not set: it names the config file of the models to serve")
    environ = {name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE}
    return load_file(path, environ)


def _forget_embedding() -> None:
    """Let workers be ordinary processes of the environment that this interpreter was embedded from.

    An embedded interpreter guesses its executable from PATH, which may name another Python's.
    """
    home = os.environ.get("PYTHONHOME", "").partition(os.pathsep)[0]
    executable = Path(home, "bin", "python3")
    if home and executable.exists():
        sys.executable = str(executable)
    for variable in _EMBEDDING_VARIABLES:
        os.environ.pop(variable, None)


def _without_ports(configuration: Configuration) -> Any:
    import dataclasses

    return dataclasses.replace(
        configuration.settings, http_port=None, grpc_port=None, metrics_port=None, transport="h2corn"
    )


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _NOT_READY, "more_body": False})


app = HostedApplication()
