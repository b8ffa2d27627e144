"""``Server``: the Python API. ``bind()`` turns callables of this program into models, each instance in
a worker process of its own; ``run()`` and ``serve()`` start and keep the server.

The supervisor runs in a thread of this program; no inference runs in it unless
``isolation="thread"`` asks for that.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from gpuserve.errors import BindError, StartupError
from gpuserve.model import (
    BatchingSpec,
    InstanceSpec,
    ModelConfig,
    ModelSpec,
    Tensor,
    check_model_name,
    tensor_specs,
)
from gpuserve.settings import ServerSettings
from gpuserve.supervisor.observer import SilentObserver
from gpuserve.supervisor.supervisor import Supervisor


class Server:
    """A server in this program. Keyword arguments are the fields of ``ServerSettings``.

    ::

        with Server(http_port=8000) as server:
            server.bind(model_name="linear", infer_func=infer, inputs=[…], outputs=[…])
            server.serve()
    """

    def __init__(self, settings: ServerSettings | None = None, **overrides: Any) -> None:
        self._settings = dataclasses.replace(settings or ServerSettings(), **overrides)
        self._specs: dict[str, ModelSpec] = {}
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._addresses: dict[str, str] = {}

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
        if any(name.lower() == model_name.lower() for name in self._specs):
            raise BindError(f"Cannot add model with the same name twice: {model_name!r} is bound already")
        if self._supervisor is not None:
            self._supervisor.add_model(spec).result()
        self._specs[model_name] = spec

    def run(self) -> None:
        """Start the server and return when every model is loaded. Does nothing when it runs.

        Raises:
            StartupError: a port is taken or a model could not be loaded; nothing is left running.
        """
        if self._supervisor is not None:
            return
        supervisor = Supervisor(
            self._settings, list(self._specs.values()), SilentObserver(), relay_output=False
        )
        self._supervisor = supervisor
        # A daemon: a program that ends without stop() takes its children along, because they are
        # tied to this very thread by the parent-death signal.
        self._thread = threading.Thread(
            target=self._supervise, args=(supervisor,), name="gpuserve-supervisor", daemon=True
        )
        self._thread.start()
        try:
            self._addresses = supervisor.started.result()
        except BaseException:
            self.stop()
            raise

    def serve(self) -> None:
        """Start the server if it does not run, and block until SIGINT, SIGTERM or ``stop()``.

        The first signal finishes what is queued, a second one ends at once. Signals are only caught
        when this is called in the main thread.

        Raises:
            StartupError: see ``run``.
        """
        with self._signals():
            self.run()
            assert self._thread is not None
            self._thread.join()
        self._stopped()

    def stop(self) -> None:
        """Finish what is queued and end every process. Does nothing when nothing runs."""
        if self._supervisor is None or self._thread is None:
            return
        self._supervisor.request_stop()
        self._thread.join()
        self._stopped()

    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self._thread is not None and self._thread.is_alive()

    def _supervise(self, supervisor: Supervisor) -> None:
        try:
            supervisor.run()
        except StartupError as error:
            self._failure = error

    def _stopped(self) -> None:
        self._supervisor = self._thread = None
        self._addresses = {}

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        count = 0

        def on_signal(number: int, frame: Any) -> None:
            nonlocal count
            count += 1
            if self._supervisor is not None:
                self._supervisor.request_stop(fast=count > 1)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def model_spec(
    model_name: str,
    infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    model_version: int,
    config: ModelConfig | None,
    strict: bool,
    isolation: str,
) -> ModelSpec:
    """What ``bind()`` was given, as a ``ModelSpec``.

    Raises:
        BindError: any of it cannot be served.
    """
    check_model_name(model_name)
    if isolation not in {"process", "thread"}:
        raise BindError(f"isolation must be 'process' or 'thread', got {isolation!r}")
    if not isinstance(model_version, int) or model_version < 1:
        raise BindError(f"model_version must be an integer of at least 1, got {model_version!r}")
    callables = _callables(infer_func)
    max_batch_size, batching = _batching(config or ModelConfig())
    return ModelSpec(
        name=model_name,
        version=model_version,
        inputs=tensor_specs(inputs, "INPUT"),
        outputs=tensor_specs(outputs, "OUTPUT"),
        max_batch_size=max_batch_size,
        batching=batching,
        strict=strict,
        instances=tuple(
            InstanceSpec(f"{number}", "cpu", _source(model_name, one, isolation))
            for number, one in enumerate(callables)
        ),
    )


def _callables(infer_func: Any) -> list[Callable[..., Any]]:
    if callable(infer_func):
        return [infer_func]
    if isinstance(infer_func, Sequence) and infer_func and all(map(callable, infer_func)):
        return list(infer_func)
    raise BindError(
        "infer_func has to be a callable or a non-empty sequence of callables, "
        f"got {type(infer_func).__name__}"
    )


def _batching(config: ModelConfig) -> tuple[int, BatchingSpec]:
    if not config.batching:
        return 0, BatchingSpec()
    if not isinstance(config.max_batch_size, int) or config.max_batch_size < 1:
        raise BindError(f"The `max_batch_size` must be greater or equal to 1, got {config.max_batch_size!r}")
    batcher = config.batcher
    if batcher is None:
        return config.max_batch_size, BatchingSpec(merge=False)
    preferred = tuple(batcher.preferred_batch_size or ())
    if not all(isinstance(size, int) and 0 < size <= config.max_batch_size for size in preferred):
        raise BindError(
            f"preferred_batch_size {list(preferred)} must hold integers from 1 to max_batch_size "
            f"({config.max_batch_size})"
        )
    if batcher.max_queue_delay_microseconds < 0:
        raise BindError("max_queue_delay_microseconds must not be negative")
    return config.max_batch_size, BatchingSpec(batcher.max_queue_delay_microseconds, preferred)


def _source(model_name: str, infer_func: Callable[..., Any], isolation: str) -> dict[str, Any]:
    if isolation == "thread":
        return {"object": infer_func}
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(infer_func)
    except Exception as error:  # whatever an object of the user's raises while it is pickled
        raise BindError(
            f"model {model_name!r}: {_named(infer_func)} cannot be sent to a worker process "
            f"({type(error).__name__}: {error}). Either pass a class, of which the worker makes the callable "
            'itself, or keep it in this process with isolation="thread".'
        ) from error
    return {"pickle": pickled, "sys_path": [path for path in sys.path if path]}


def _named(infer_func: Callable[..., Any]) -> str:
    name = getattr(infer_func, "__qualname__", None) or type(infer_func).__qualname__
    return f"the callable {name!r}"
