"""What ``Server`` and ``AttachedServer`` have in common: models that are bound, a thread that keeps their
workers, and ``run()``, ``serve()`` and ``stop()`` over it.

What that thread does is a ``Runner``'s to know: a whole server, or an attachment to somebody else's.
"""

from __future__ import annotations

import abc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self

from gpuserve.api.binding import check_new, model_spec
from gpuserve.api.display import server_html, server_text, where
from gpuserve.api.shared_state import SharedStates
from gpuserve.errors import BindError, GpuserveError
from gpuserve.model.declaration import ModelConfig, Tensor
from gpuserve.model.spec import ModelSpec
from gpuserve.placement.server_devices import ServerDevices

logger = logging.getLogger(__name__)

_SHARED: Final = (
    "models %r and %r share an object (%s), and each has a copy of it, in a process of its own: what one "
    'changes the other does not see. Bind both with isolation="thread", and they keep the one object'
)


class Runner(Protocol):
    """What the thread runs. All but ``run`` may be called from any thread."""

    started: Future[dict[str, str]]

    def run(self) -> object:
        """Live until stopped; raises what ended it, where that was not ``request_stop``."""

    def add_model(self, spec: ModelSpec) -> Future[None]:
        """Serve one more model; resolves when it is ready."""

    def remove_model(self, model: str) -> Future[None]:
        """Serve every version of a model no more; resolves when its workers have ended."""

    def request_stop(self, fast: bool = False, terminated: bool = False) -> None:
        """Ask it to end, at once or for a SIGTERM; may be called from signal handlers."""


class _SupervisorThread(threading.Thread):
    """A thread that is waited for by ``wait_over``. Where a signal handler of the program raises in a
    ``join``, CPython 3.11 takes the thread for ended, which it is not.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._over = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.set()

    def wait_over(self) -> None:
        self._over.wait()
        self.join()


class ModelHost(abc.ABC):
    """Models of this program, and whether they are served. Its methods may be called from any thread."""

    #: Whether a name may be bound only once, whatever the version.
    _one_version = False
    #: Whether a model that is bound again takes the place of the one before.
    _replaces = False

    def __init__(self) -> None:
        self._specs: dict[tuple[str, int], ModelSpec] = {}
        self._devices = ServerDevices()
        self._states = SharedStates()
        self._runner: Runner | None = None
        self._thread: _SupervisorThread | None = None
        self._failure: BaseException | None = None
        self._addresses: dict[str, str] = {}
        #: Held for moments only: a model is in the list of a start, or added to what has started. A signal's
        #: handler may come in between, and call ``stop()``.
        self._lock = threading.RLock()

    @abc.abstractmethod
    def _new_runner(self, models: Sequence[ModelSpec]) -> Runner:
        """What is to run, with models that are placed; nothing is started yet."""

    def __repr__(self) -> str:
        return server_text(type(self).__name__, self.declared, self.addresses)

    def _repr_html_(self) -> str:
        return server_html(type(self).__name__, self.declared, self.addresses)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def bound(self) -> tuple[tuple[str, int], ...]:
        """The models that are bound, by name and version."""
        with self._lock:
            return tuple(self._specs)

    @property
    def declared(self) -> tuple[ModelSpec, ...]:
        """What is known of the models that are bound."""
        with self._lock:
            return tuple(self._specs.values())

    @property
    def addresses(self) -> dict[str, str]:
        """Where the running server is reached, by "http", "grpc", "metrics" and "health"."""
        return dict(self._addresses)

    def bind(
        self,
        model_name: str,
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool | Literal["exact"] = True,
        *,
        device: str | Sequence[str] = "cpu",
        isolation: Literal["process", "thread"] = "process",
        concurrency: int | None = None,
        on_unrecoverable: Literal["shutdown", "restart_worker"] = "shutdown",
    ) -> None:
        """Serve a callable under a name. Where the server runs it returns when the model is loaded. With a
        ``Server`` a name and version that is bound already is replaced: what was asked before is answered
        by the earlier callable, and where the new one cannot be loaded, that one stays.

        Args:
            model_version: several versions of a name may be bound; requests without one go to the highest.
            infer_func: a callable, or several: one instance each, requests go to whichever has room.
            inputs, outputs: without the batch axis where the model batches; None: as the callable says of
                itself, by its attributes. Without a config so are batches, arrays and generators.
            strict: answers that do not fit ``outputs`` in name, dtype or shape are errors; only what is safe
                is cast. False casts whatever can be, "exact" nothing: those are PyTriton's two.
            device: "cpu", "cuda:0", …, "cuda:*" for one instance on every GPU, or the UUID of a GPU or MIG
                instance. A list gives each of several callables its own, or one callable an instance on each.
            isolation: "process" sends the callable to a worker process with cloudpickle; "thread"
                keeps it in this process, for what cannot be pickled.
            concurrency: how many batches an async callable or a generator may have under way at once in
                one instance; None leaves it to the kind of the callable.
            on_unrecoverable: what ``UnrecoverableError`` raised by the callable ends: "shutdown" the whole
                server, "restart_worker" the instance, which is replaced.

        Raises:
            BindError: the name, a tensor, the config or the callable cannot be served.
            StartupError: where the server runs, the model could not be loaded.
            DeviceError: where the server runs, this machine does not have the device.
            AttachError: the server of another program has ended meanwhile.
        """
        spec = model_spec(
            model_name,
            infer_func,
            inputs,
            outputs,
            model_version,
            config,
            strict,
            isolation,
            concurrency,
            on_unrecoverable,
            device,
        )
        self.add(spec, infer_func)

    def add(self, spec: ModelSpec, infer_func: Any = ()) -> None:
        """Serve a model that is declared already, as ``bind`` does, of these callables.

        Raises:
            BindError, StartupError, DeviceError, AttachError: as ``bind``.
        """
        key = spec.name, spec.version
        with self._lock:
            before = self._specs.get(key)
            others = [one for one in self._specs.values() if not self._replaces or one is not before]
            check_new(spec, others, one_version=self._one_version)
            self._specs[key] = spec
            runner = self._runner if self.is_alive() else None
            self._tell_shared(spec, infer_func)
        if before is not None:
            logger.info("model %s, version %d: it was bound before, and is replaced", *key)
        if runner is None:
            return
        try:
            (placed,) = self._devices.place([spec], again=True)
            runner.add_model(placed).result()
        except GpuserveError:
            with self._lock:
                del self._specs[key]
                self._states.forget(key)
                if before is not None:
                    self._specs[key] = before
            raise

    def unbind(self, model_name: str) -> None:
        """Serve every version of a model no more. Where the server runs it returns when what was asked of it
        is answered and its workers have ended.

        Raises:
            BindError: no model of that name is bound.
            StartupError, AttachError: the server has ended meanwhile.
        """
        with self._lock:
            names = {name for name, _ in self._specs}
            if model_name not in names:
                raise BindError(f"no model {model_name!r} is bound, expected one of {sorted(names)}")
            runner = self._runner if self.is_alive() else None
        if runner is not None:
            runner.remove_model(model_name).result()
        self._forget(model_name)

    def _forget(self, model: str) -> None:
        with self._lock:
            for key in [key for key in self._specs if key[0] == model]:
                del self._specs[key]
                self._states.forget(key)

    def _tell_shared(self, spec: ModelSpec, infer_func: Any) -> None:
        callables = infer_func if isinstance(infer_func, Sequence) else [infer_func]
        is_copied = any("object" not in one.source for one in spec.instances)
        shared = self._states.bind((spec.name, spec.version), callables, is_copied=is_copied)
        for (model, _), kind in shared:
            logger.warning(_SHARED, model, spec.name, kind)

    def run(self) -> None:
        """Start, and return when every model is loaded and served. Does nothing when it runs. At a prompt, or
        in a notebook, it prints the addresses.

        Raises:
            StartupError: a port is taken or a model could not be loaded; nothing is left running.
            DeviceError: this machine does not have the device of a model.
            BindError: the server of another program refuses a model.
            AttachError: there is no server of another program to attach to.
        """
        is_new = not self.is_alive()
        self._wait_started(self._start())
        if is_new and hasattr(sys, "ps1"):  # of an interactive Python, and of IPython
            sys.stdout.write(f"{where(self.addresses)}\n")

    def serve(self) -> None:
        """Start if it does not run, and block until SIGINT, SIGTERM or ``stop()``.

        The first signal finishes what is queued, a second one ends at once. Signals are only caught
        when this is called in the main thread, and not where the program has a handler of its own.

        Raises:
            StartupError, DeviceError, BindError, AttachError: see ``run``; AttachError also when the server
                of another program ends.
            ModelUnrecoverable: a callable raised ``UnrecoverableError``, and all has ended.
        """
        self._raise_untold()
        with self._signals() as signals:
            runner, thread = self._start()
            if signals:  # it came before there was anything to stop
                runner.request_stop()  # nobody has been served
            try:
                self._wait_started((runner, thread))
            except GpuserveError:
                if signals:  # ended while it loaded, as was asked for
                    return
                raise
            thread.wait_over()
        self._stopped(runner)
        if self._failure is not None:
            raise self._failure

    def _raise_untold(self) -> None:
        """What ended the last run, if it went by itself and nobody has asked since."""
        runner, failure = self._runner, self._failure
        if runner is not None and not self.is_alive() and failure is not None:
            self._stopped(runner)
            raise failure

    def stop(self) -> None:
        """End every process of this program's models. Does nothing when nothing runs."""
        runner, thread = self._runner, self._thread
        if runner is None or thread is None:
            return
        runner.request_stop()
        thread.wait_over()
        self._stopped(runner)

    def is_alive(self) -> bool:
        """Whether the server, or the attachment to one, runs."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> tuple[Runner, _SupervisorThread]:
        """The runner and its thread; those that run, where they do."""
        with self._lock:
            if self._runner is not None and self._thread is not None and self._thread.is_alive():
                return self._runner, self._thread
            runner = self._new_runner(self._devices.place(self._specs.values(), again=True))
            # A daemon: a program that ends without stop() takes its children along, because they are
            # tied to this very thread by the parent-death signal.
            thread = _SupervisorThread(
                target=self._supervise, args=(runner,), name="gpuserve-supervisor", daemon=True
            )
            thread.start()
            self._runner, self._thread = runner, thread
            return runner, thread

    def _wait_started(self, running: tuple[Runner, _SupervisorThread]) -> None:
        runner, thread = running
        try:
            self._addresses = runner.started.result()
        except BaseException:
            runner.request_stop()
            thread.wait_over()
            self._stopped(runner)
            raise

    def _supervise(self, runner: Runner) -> None:
        self._failure = None
        try:
            runner.run()
        except GpuserveError as error:  # run() raises it where it is one of the start, serve() otherwise
            self._failure = error
        except Exception as error:  # a fault of ours: every process is ended, and serve() raises it
            logger.exception("the server failed")
            self._failure = error

    def _stopped(self, runner: Runner) -> None:
        with self._lock:
            if self._runner is runner:  # and not one that another thread has started since
                self._runner = self._thread = None
                self._addresses = {}

    @contextmanager
    def _signals(self) -> Iterator[list[int]]:
        """SIGINT and SIGTERM stop the server; the list fills with those that came. A handler of the program's
        own stays, and does what it does: it may call ``stop()``.
        """
        signals: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            yield signals
            return

        def on_signal(number: int, frame: Any) -> None:
            signals.append(number)
            if self._runner is not None:
                self._runner.request_stop(fast=len(signals) > 1, terminated=number == signal.SIGTERM)

        before = {
            number: signal.signal(number, on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
        }
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
