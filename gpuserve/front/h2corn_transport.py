"""h2corn as the server of the endpoint. Nothing else knows it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, Final, cast

from gpuserve.front.endpoint.asgi import Application
from gpuserve.tls import TlsFiles

logger = logging.getLogger(__name__)

#: Streams of one connection at once. More wait in the client; requests of more are queued anyway.
MAX_CONCURRENT_STREAMS: Final = 4096
#: After our own drain every request is answered, and what idles is closed at once. What is waited for are
#: answers that h2corn holds for clients slow to read them, and connections that never asked anything.
CLOSE_TIMEOUT_S: Final = 3.0
#: After its certificate is renewed, streams of a connection with the old one may go on for so long.
RENEWAL_TIMEOUT_S: Final = 3600.0


class H2cornTransport:
    """HTTP/1.1, HTTP/2 and gRPC on every listener, by h2corn (its I/O runs in Rust threads)."""

    def __init__(
        self,
        application: Application,
        listener_fds: list[int],
        log_format: str,
        tls: TlsFiles | None = None,
    ) -> None:
        self._application = application
        self._listener_fds = listener_fds
        self._log_format = log_format
        self._tls = tls
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        #: Of servers that only finish what they have, on connections made before a renewal.
        self._finishing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Accept connections on every listener."""
        import h2corn

        self._server = h2corn.Server(cast("Any", self._application), self._config())
        with _quiet_stderr():
            self._serving = asyncio.get_running_loop().create_task(self._server.serve())
            started = asyncio.ensure_future(self._server.wait_started())
            done, _ = await asyncio.wait({self._serving, started}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving in done:
            started.cancel()
            await self._serving
        await started
        self._serving.add_done_callback(self._on_ended)

    def announce(self) -> None:
        """h2corn tells its clients when it is shut down, not before."""

    @property
    def n_unaware(self) -> int:
        """Nobody is told."""
        return 0

    @property
    def n_held(self) -> int:
        """It is not known which connection has which."""
        return 0

    def limit_age(self, max_age_s: float) -> None:
        """Its connections keep what they were made with."""

    async def renew(self) -> None:
        """Put a successor with the new files on the same listeners; the old server finishes what it has."""
        if self._tls is None or self._serving is None:
            return
        server, serving = self._server, self._serving
        try:
            await self.start()
        except (OSError, ValueError):
            self._server, self._serving = server, serving
            raise
        serving.remove_done_callback(self._on_ended)
        self._finishing.add(serving)
        serving.add_done_callback(self._finishing.discard)
        server.shutdown()

    async def stop(self) -> None:
        """Close the connections; in-flight requests were finished before."""
        if self._server is not None and self._serving is not None:
            self._serving.remove_done_callback(self._on_ended)
            self._server.shutdown()
            await asyncio.wait({self._serving, *self._finishing}, timeout=CLOSE_TIMEOUT_S + 1.0)

    def _config(self) -> Any:
        import h2corn

        return h2corn.Config(
            bind=tuple(f"fd://{fd}" for fd in self._listener_fds),
            grpc=True,
            runtime_threads=_io_threads(),
            lifespan="off",
            access_log=False,
            log_format="json" if self._log_format == "json" else "text",
            max_concurrent_streams=MAX_CONCURRENT_STREAMS,
            max_request_body_size=0,  # the endpoint has a limit, and a better sentence for it
            **self._tls_options(),
        )

    def _tls_options(self) -> dict[str, Any]:
        if self._tls is None:
            return {"timeout_graceful_shutdown": CLOSE_TIMEOUT_S}
        options: dict[str, Any] = {"certfile": self._tls.certfile, "keyfile": self._tls.keyfile}
        if self._tls.client_ca:
            options |= {"ca_certs": self._tls.client_ca, "cert_reqs": "required"}
        return {**options, "timeout_graceful_shutdown": RENEWAL_TIMEOUT_S}

    def _on_ended(self, serving: asyncio.Task[None]) -> None:
        """Without its server a front is of no use; the supervisor starts another."""
        error = None if serving.cancelled() else serving.exception()
        logger.critical("the server of the endpoint ended by itself", exc_info=error)
        os._exit(1)


def _io_threads() -> int:
    """On two cores a second I/O thread takes from the loop and the workers what it gives."""
    return 1 if len(os.sched_getaffinity(0)) <= 2 else 2


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """h2corn prints a banner that cannot be switched off; the supervisor says the addresses itself."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
