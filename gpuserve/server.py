"""``Server``: the Python API. ``bind()`` turns callables of this program into models, each instance in
a worker process of its own; ``run()`` and ``serve()`` start and keep the server.

The supervisor runs in a thread of this program; no inference runs in it unless
``isolation="thread"`` asks for that.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from gpuserve.binding import model_spec
from gpuserve.errors import BindError, StartupError
from gpuserve.model import ModelConfig, Tensor
from gpuserve.settings import ServerSettings
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.observer import SilentObserver
from gpuserve.supervisor.supervisor import Supervisor

logger = logging.getLogger(__name__)


class Server:
    """A server in this program::

        with Server(http_port=8000) as server:
            server.bind(model_name="linear", infer_func=infer, inputs=[…], outputs=[…])
            server.serve()

    Its methods may be called from any thread. After ``stop()`` it can be run again, with its models.

    Args:
        settings: all settings in one; the keyword arguments replace single ones:
        host: the address to listen on, "0.0.0.0" by default.
        http_port, grpc_port, metrics_port: 8000, 8001, 8002; 0 picks a free one, None switches it off.
        transport: "h2corn" (both protocols on every port) or "grpcio" (the gRPC port by grpc.aio).
        name: the server's name in its metadata.
        drain_timeout_s: how long ``stop()`` finishes what is queued, in seconds.
        load_timeout_s: how long a callable may take to load, in seconds; 0 is for ever.
        max_request_nbytes: the largest request body, in bytes.
        max_arena_nbytes: shared memory that the inputs of one model may take, in bytes.
        response_cache_nbytes: memory for the answers of models with a response cache, in bytes.
        http_header_forward_pattern, grpc_header_forward_pattern: request headers that this regular
            expression is found in reach ``Request.parameters``.
        restricted_endpoints, access_token: groups of endpoints that need the token.
        attachable: whether other programs of this user may serve models through this server.
        log_format, log_level: how the front process logs: "text" or "json"; "debug" to "error".

    Raises:
        TypeError: a keyword argument is no setting.
    """

    def __init__(self, settings: ServerSettings | None = None, **overrides: Any) -> None:
        _check_names(overrides)
        self._settings = dataclasses.replace(settings or ServerSettings(), **overrides)
        self._specs: dict[str, ModelSpec] = {}
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._addresses: dict[str, str] = {}
        #: Held for moments only: a model is in the list of a start, or added to what has started.
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def addresses(self) -> dict[str, str]:
        """Where the running server is reached, by "http", "grpc" and "metrics"."""
        return dict(self._addresses)

    def bind(
        self,
        model_name: str,
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        *,
        isolation: Literal["process", "thread"] = "process",
    ) -> None:
        """Serve a callable under a name. On a running server it returns when the model is loaded.

        Args:
            infer_func: a callable, or several: one instance each, requests go to whichever has room.
            inputs, outputs: without the batch axis where the model batches.
            strict: answers that do not fit ``outputs`` in name, dtype or shape are errors.
            isolation: "process" sends the callable to a worker process with cloudpickle; "thread"
                keeps it in this process, for what cannot be pickled.

        Raises:
            BindError: the name, a tensor, the config or the callable cannot be served.
            StartupError: on a running server, the model could not be loaded.
        """
        spec = model_spec(model_name, infer_func, inputs, outputs, model_version, config, strict, isolation)
        with self._lock:
            if any(name.lower() == model_name.lower() for name in self._specs):
                raise BindError(f"Cannot add model with the same name twice: {model_name!r} is bound already")
            self._specs[model_name] = spec
            supervisor = self._supervisor if self.is_alive() else None
        if supervisor is None:
            return
        try:
            supervisor.add_model(spec).result()
        except StartupError:
            del self._specs[model_name]
            raise

    def run(self) -> None:
        """Start the server and return when every model is loaded. Does nothing when it runs.

        Raises:
            StartupError: a port is taken or a model could not be loaded; nothing is left running.
        """
        self._wait_started(self._start())

    def serve(self) -> None:
        """Start the server if it does not run, and block until SIGINT, SIGTERM or ``stop()``.

        The first signal finishes what is queued, a second one ends at once. Signals are only caught
        when this is called in the main thread.

        Raises:
            StartupError: see ``run``.
        """
        with self._signals() as signals:
            supervisor, thread = self._start()
            if signals:  # it came before there was anything to stop
                supervisor.request_stop()
            try:
                self._wait_started((supervisor, thread))
            except StartupError:
                if signals:  # ended while it loaded, as was asked for
                    return
                raise
            thread.join()
        self._stopped(supervisor)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Finish what is queued and end every process. Does nothing when nothing runs."""
        supervisor, thread = self._supervisor, self._thread
        if supervisor is None or thread is None:
            return
        supervisor.request_stop()
        thread.join()
        self._stopped(supervisor)

    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> tuple[Supervisor, threading.Thread]:
        """The supervisor and its thread; those that run, where they do."""
        with self._lock:
            if self._supervisor is not None and self._thread is not None and self._thread.is_alive():
                return self._supervisor, self._thread
            models = list(self._specs.values())
            supervisor = Supervisor(self._settings, models, SilentObserver(), relay_output=False)
            # A daemon: a program that ends without stop() takes its children along, because they are
            # tied to this very thread by the parent-death signal.
            thread = threading.Thread(
                target=self._supervise, args=(supervisor,), name="gpuserve-supervisor", daemon=True
            )
            thread.start()
            self._supervisor, self._thread = supervisor, thread
            return supervisor, thread

    def _wait_started(self, running: tuple[Supervisor, threading.Thread]) -> None:
        supervisor, thread = running
        try:
            self._addresses = supervisor.started.result()
        except BaseException:
            supervisor.request_stop()
            thread.join()
            self._stopped(supervisor)
            raise

    def _supervise(self, supervisor: Supervisor) -> None:
        self._failure = None
        try:
            supervisor.run()
        except StartupError:
            pass  # run() raises it
        except Exception as error:  # a fault of ours: every process is ended, and serve() raises it
            logger.exception("the server failed")
            self._failure = error

    def _stopped(self, supervisor: Supervisor) -> None:
        with self._lock:
            if self._supervisor is supervisor:  # and not one that another thread has started since
                self._supervisor = self._thread = None
                self._addresses = {}

    @contextmanager
    def _signals(self) -> Iterator[list[int]]:
        """SIGINT and SIGTERM stop the server; the list fills with those that came."""
        signals: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            yield signals
            return

        def on_signal(number: int, frame: Any) -> None:
            signals.append(number)
            if self._supervisor is not None:
                self._supervisor.request_stop(fast=len(signals) > 1)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _check_names(overrides: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(ServerSettings)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f", expected one of {', '.join(known)}"
            raise TypeError(f"Server has no setting {name!r}{meant}")
