"""The common part of ``Server`` and ``AttachedServer``: bound models, a supervisor thread, and ``run()``,
``serve()`` and ``stop()``. The thread runs a ``Runner``: a whole server, or an attachment to one.
"""

from __future__ import annotations

import abc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from gpuserve.api.binding import check_new, model_spec
from gpuserve.api.notebook_html import server_html, server_text, where
from gpuserve.api.pickled_callables import SharedObjects
from gpuserve.core.errors import BindError, GpuserveError
from gpuserve.core.suggestions import explained
from gpuserve.model.declaration import ModelConfig, Tensor
from gpuserve.model.placement import ServerDevices
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.inference.stepping import Served

if TYPE_CHECKING:
    from gpuserve.supervisor.attach.attachment import Attachment
    from gpuserve.supervisor.supervisor import Supervisor

logger = logging.getLogger(__name__)

_SHARED: Final = (
    "models %r and %r share an object (%s), and each has a copy of it, in a process of its own: what one "
    'changes the other does not see. Bind both with isolation="thread", and they keep the one object'
)


#: The object that the supervisor thread runs. Other threads may call all of its methods but ``run``.
Runner: TypeAlias = "Supervisor | Attachment"


class _SupervisorThread(threading.Thread):
    """A thread that ``wait_over`` waits for. ``join`` alone is not reliable: if a signal handler raises
    during a ``join``, CPython 3.11 wrongly considers the thread ended.
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
    """Models of this program, and their service. Its methods may be called from any thread."""

    #: True if a name may be bound only once, regardless of the version.
    _one_version = False
    #: True if binding a model again replaces the earlier one.
    _replaces = False

    def __init__(self) -> None:
        self._specs: dict[tuple[str, int], ModelSpec] = {}
        self._devices = ServerDevices()
        self._states = SharedObjects()
        self._runner: Runner | None = None
        self._thread: _SupervisorThread | None = None
        self._failure: BaseException | None = None
        self._addresses: dict[str, str] = {}
        #: Called when all models are served after a start.
        self.on_started: Callable[[], object] = list
        #: Held only for moments. Reentrant, because a signal handler may interrupt the holder and call
        #: ``stop()``.
        self._lock = threading.RLock()

    @abc.abstractmethod
    def _new_runner(self, models: Sequence[ModelSpec]) -> Runner:
        """Return the runner for models that are placed; nothing is started yet."""

    def __repr__(self) -> str:
        return server_text(type(self).__name__, self.declared, self.addresses)

    def _repr_html_(self) -> str:
        return server_html(type(self).__name__, self.declared, self.addresses)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def bound(self) -> tuple[tuple[str, int], ...]:
        """The bound models, by name and version."""
        with self._lock:
            return tuple(self._specs)

    @property
    def declared(self) -> tuple[ModelSpec, ...]:
        """The specifications of the bound models."""
        with self._lock:
            return tuple(self._specs.values())

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of the running server, by "http", "grpc", "metrics" and "health"."""
        return dict(self._addresses)

    @partial(explained, config=ModelConfig)
    def bind(
        self,
        model_name: str,
        infer_func: Served | Sequence[Served],
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool | Literal["exact"] = True,
        *,
        device: str | Sequence[str] = "cpu",
        ranks: int = 1,
        gpu_share: float = 0.0,
        isolation: Literal["process", "thread"] = "process",
        concurrency: int | None = None,
        on_unrecoverable: Literal["shutdown", "restart_worker"] = "shutdown",
    ) -> None:
        """Serve a callable under a name. If the server runs, return when the model is loaded.

        With a ``Server``, a name and version that is bound already is replaced: earlier requests are answered
        by the earlier callable, and if the new callable fails to load, the earlier one stays.

        Args:
            model_name: the name of the model.
            infer_func: a callable, or a list with one callable for each instance. Requests go to any instance
                that has room.
            inputs, outputs: the tensors, without the batch axis if the model batches. None: as the attributes
                of the callable say. Without a ``config`` the same holds for batching, arrays and generators.
            model_version: the version. Several versions of a name may be bound; requests without a version go
                to the highest.
            config: the configuration of the model.
            strict: True: outputs that do not match ``outputs`` in name, dtype or shape are errors; only safe
                casts are made. False casts whenever possible, "exact" never: these are the two modes of
                PyTriton.
            device: "cpu", "cuda:0", …, "cuda:*" for one instance on every GPU, "auto" for the GPU with the
                most free memory, "cuda:0+cuda:1" for an instance that uses both, or the UUID of a GPU or MIG
                instance. A list has a device for each of
                several callables, or for each instance of one callable.
            ranks: the processes of each instance, one on each GPU of "cuda:0+cuda:1", or all on the CPU. Each
                runs every batch, in an environment for torch.distributed.
            gpu_share: the part of a GPU's multiprocessors, up to 1, on which a kernel of an instance runs at
                most, by CUDA's MPS. 0: no limit.
            isolation: "process" sends the callable to a worker process with cloudpickle; "thread" keeps it in
                this process, for callables that cannot be pickled.
            concurrency: the number of batches that an async callable or a generator may run at once in one
                instance; None: the default for the kind of callable.
            on_unrecoverable: the effect of ``UnrecoverableError`` raised by the callable: "shutdown" ends the
                whole server, "restart_worker" replaces the instance.

        Raises:
            BindError: the name, a tensor, the config or the callable cannot be served.
            StartupError: the server runs, and the model failed to load.
            DeviceError: the server runs, and this machine lacks the device.
            AttachError: the server of another program has ended meanwhile.
        """
        options = (model_version, config, strict, isolation, concurrency, on_unrecoverable)
        place = device, ranks, gpu_share
        spec = model_spec(model_name, infer_func, inputs, outputs, *options, *place)
        self.add(spec, infer_func)

    def add(self, spec: ModelSpec, infer_func: Any = ()) -> None:
        """Serve a model with a complete specification. ``infer_func``: its callables. Raise as ``bind``."""
        key = spec.name, spec.version
        with self._lock:
            before = self._specs.get(key)
            others = [one for one in self._specs.values() if not self._replaces or one is not before]
            check_new(spec, others, one_version=self._one_version)
            self._specs[key] = spec
            runner = self._runner if self.is_alive() else None
            callables = infer_func if isinstance(infer_func, Sequence) else [infer_func]
            is_copied = any("object" not in instance.source for instance in spec.instances)
            for (model, _), kind in self._states.bind(key, callables, is_copied=is_copied):
                logger.warning(_SHARED, model, spec.name, kind)
        if before is not None:
            logger.info("model %s, version %d: replaced the earlier binding", *key)
        if runner is None:
            return
        try:
            (placed,) = self._devices.place([spec], again=True, beside=self.declared)
            runner.add_model(placed).result()
        except GpuserveError:
            with self._lock:
                del self._specs[key]
                self._states.forget(key)
                if before is not None:
                    self._specs[key] = before
            raise

    def unbind(self, model_name: str) -> None:
        """Stop serving every version of a model. If the server runs, return when the model's requests are
        answered and its workers have ended. Raise BindError if no model of that name is bound, or the error
        with which the server has ended meanwhile.
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

    def run(self) -> None:
        """Start the server, and return when every model is loaded and served. Do nothing if the server runs.
        In an interactive session or a notebook, print the addresses.

        Raises:
            StartupError: a port is taken, or a model failed to load; nothing is left running.
            DeviceError: this machine lacks the device of a model.
            BindError: the server of another program refuses a model.
            AttachError: no server of another program was found.
        """
        is_new = not self.is_alive()
        self._wait_started(self._start())
        if is_new and hasattr(sys, "ps1"):  # interactive Python and IPython
            sys.stdout.write(f"{where(self.addresses)}\n")

    def serve(self) -> None:
        """Start the server if it does not run, and block until SIGINT, SIGTERM or ``stop()``.

        The first signal finishes queued requests, a second one ends at once. Signals are handled only if this
        method is called in the main thread, and only if the program has no handler of its own for them.

        Raises:
            StartupError, DeviceError, BindError, AttachError: as ``run``; AttachError also if the server of
                another program ends.
            ModelUnrecoverable: a callable raised ``UnrecoverableError``, and the server has ended.
        """
        runner, failure = self._runner, self._failure
        if runner is not None and not self.is_alive() and failure is not None:
            self._stopped(runner)
            raise failure  # the error that ended the last run, which nobody has seen yet
        with self._signals() as signals:
            runner, thread = self._start()
            if signals:  # a signal came before the runner existed
                runner.request_stop()
            try:
                self._wait_started((runner, thread))
            except GpuserveError:
                if signals:  # a signal ended the start
                    return
                raise
            thread.wait_over()
        self._stopped(runner)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop the server, and end all processes of this program's models. Do nothing if it does not run."""
        runner, thread = self._runner, self._thread
        if runner is None or thread is None:
            return
        runner.request_stop()
        thread.wait_over()
        self._stopped(runner)

    def is_alive(self) -> bool:
        """Return whether the server, or the attachment to one, runs."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> tuple[Runner, _SupervisorThread]:
        with self._lock:
            if self._runner is not None and self._thread is not None and self._thread.is_alive():
                return self._runner, self._thread
            runner = self._new_runner(self._devices.place(self._specs.values(), again=True))
            name, supervise = "gpuserve-supervisor", partial(self._supervise, runner)
            # A daemon: the children are tied to this thread by the parent-death signal, so a program that
            # ends without stop() ends its children as well.
            thread = _SupervisorThread(target=supervise, name=name, daemon=True)
            thread.start()
            self._runner, self._thread = runner, thread
            return runner, thread

    def _wait_started(self, running: tuple[Runner, _SupervisorThread]) -> None:
        runner, thread = running
        is_known = bool(self._addresses)
        try:
            self._addresses = runner.started.result()
        except BaseException:
            runner.request_stop()
            thread.wait_over()
            self._stopped(runner)
            raise
        if not is_known:
            self.on_started()

    def _supervise(self, runner: Runner) -> None:
        self._failure = None
        try:
            runner.run()
        except Exception as error:
            if not isinstance(error, GpuserveError):  # a defect of gpuserve: every process is ended
                logger.exception("the server failed")
            self._failure = error  # raised by run() during the start, by serve() later

    def _stopped(self, runner: Runner) -> None:
        with self._lock:
            if self._runner is runner:  # another thread may have started a new one
                self._runner = self._thread = None
                self._addresses = {}

    @contextmanager
    def _signals(self) -> Iterator[list[int]]:
        """Stop the server on SIGINT and SIGTERM, and yield a list that receives the signals. A handler of the
        program stays in place.
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
