"""``Triton`` and ``RemoteTriton``: PyTriton's server over ``gpuserve.Server`` and ``AttachedServer``.
Inference callables run in threads of this process, as PyTriton's do, because programs share objects between
them and use objects that cannot be pickled. ``GPUSERVE_ISOLATION=process`` runs each in a process.
"""

from __future__ import annotations

import abc
import atexit
import copy
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from gpuserve.api.binding import EXACT, model_spec
from gpuserve.api.model_host import ModelHost
from gpuserve.api.notebook_html import server_html, server_text
from gpuserve.api.server import AttachedServer, Server
from gpuserve.compat.pytriton.client.exceptions import PyTritonClientInvalidUrlError
from gpuserve.compat.pytriton.constants import DEFAULT_TRITON_STARTUP_TIMEOUT_S
from gpuserve.compat.pytriton.exceptions import (
    PyTritonInvalidOperationError,
    PyTritonValidationError,
    pytriton_errors,
)
from gpuserve.compat.pytriton.triton_config import (
    DEFAULT_PROTECTED_ENDPOINTS,
    TRITON_ACCESS_HEADER,
    VALID_TRITON_ENDPOINTS,
    TritonConfig,
    TritonSecurityConfig,
    ineffective_options,
    merged_configs,
    server_settings,
)
from gpuserve.compat.pytriton.utils import Workspace
from gpuserve.core.errors import AttachError, BadModelConfig
from gpuserve.core.suggestions import explained
from gpuserve.model.build import warmup_as_given
from gpuserve.model.declaration import ModelConfig, Tensor
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.inference.callable_loading import YIELDING, CallableKind, kind_of

__all__ = [
    "DEFAULT_PROTECTED_ENDPOINTS", "GROWTH_BACKEND_SHM_SIZE", "INITIAL_BACKEND_SHM_SIZE", "MODEL_CONFIG_URL",
    "MODEL_INFER_URL", "MODEL_READY_URL", "MODEL_URL", "MONITORING_PERIOD_S", "TRITONSERVER_DIST_DIR",
    "TRITON_ACCESS_HEADER", "VALID_TRITON_ENDPOINTS", "WAIT_FORM_MODEL_TIMEOUT_S",
    "DefaultTritonLifecyclePolicy", "RemoteTriton", "Triton", "TritonBase", "TritonConfig",
    "TritonLifecyclePolicy", "TritonSecurityConfig", "VertextAILifecyclePolicy",
]  # fmt: skip

logger = logging.getLogger(__name__)

MONITORING_PERIOD_S: Final = 10.0
WAIT_FORM_MODEL_TIMEOUT_S: Final = 60.0
MODEL_URL: Final = "/v2/models/{model_name}"
MODEL_READY_URL: Final = f"{MODEL_URL}/ready"
MODEL_CONFIG_URL: Final = f"{MODEL_URL}/config"
MODEL_INFER_URL: Final = f"{MODEL_URL}/infer"
_URLS: Final = (
    ("Status:", f"GET  {MODEL_READY_URL}"),
    ("Model config:", f"GET  {MODEL_CONFIG_URL}"),
    ("Inference:", f"POST {MODEL_INFER_URL}"),
)
#: Constants of the Triton binary, which gpuserve does not have. Programs import the names.
INITIAL_BACKEND_SHM_SIZE: Final = 4 << 20
GROWTH_BACKEND_SHM_SIZE: Final = 1 << 20
TRITONSERVER_DIST_DIR: Final = Path("tritonserver")

#: "thread" or "process": the place where inference callables run.
ISOLATION_VARIABLE: Final = "GPUSERVE_ISOLATION"
_VERBOSE: Final = (
    "Triton Inference Server is running with enabled verbose logs (log_verbose_level=%d). "
    "It may affect inference performance."
)


@dataclass
class TritonLifecyclePolicy:
    """The choice of ``with Triton()`` or ``run()`` as the start. ``local_model_store`` has no effect."""

    launch_triton_on_startup: bool = True
    local_model_store: bool = False


DefaultTritonLifecyclePolicy: Final = TritonLifecyclePolicy()
VertextAILifecyclePolicy: Final = TritonLifecyclePolicy(False, True)


class TritonBase(abc.ABC):
    """The common parts of ``Triton`` and ``RemoteTriton``: models over a ``ModelHost``."""

    def __init__(self, host: ModelHost, workspace: Workspace | str | Path | None) -> None:
        self._host = host
        host.on_started = self._log_urls
        self._has_models = False
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @partial(explained, config=ModelConfig)
    def bind(
        self,
        model_name: str,
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
    ) -> None:
        """Serve a callable under a name, as ``ModelHost.bind`` says; raise PyTritonValidationError,
        PyTritonInvalidOperationError if the name is bound, PyTritonBadParameterError for a value of
        ``config``, or PyTritonRuntimeError if the server runs and the model could not be loaded.
        """
        if trace_config:
            text = "bind(trace_config=…) is not supported by gpuserve: give it to TritonConfig, which is for "
            text += "all models, and change it for one by the trace settings of the protocol"
            raise PyTritonValidationError(text)
        bound = [(name.lower(), version) for name, version in self._host.bound]
        if (model_name.lower(), model_version) in bound:
            text = f"Cannot add model with the same name twice: {model_name!r} is bound already"
            raise PyTritonInvalidOperationError(text)
        isolation = os.environ.get(ISOLATION_VARIABLE) or "thread"
        with pytriton_errors():
            more = (model_version, config, strict, isolation)
            spec = bound_spec(model_name, infer_func, inputs, outputs, *more)
            self._host.add(spec, infer_func)
        self._has_models = True
        if self.is_connected():
            self._log_urls(model_name)

    @abc.abstractmethod
    def connect(self) -> None:
        """Wait until the server has this program's models."""

    def __repr__(self) -> str:
        return server_text(type(self).__name__, self._host.declared, self._host.addresses)

    def _repr_html_(self) -> str:
        return server_html(type(self).__name__, self._host.declared, self._host.addresses)

    @abc.abstractmethod
    def serve(self, monitoring_period_s: float = MONITORING_PERIOD_S) -> None:
        """Start, and block until SIGINT, SIGTERM or ``stop()``."""

    def stop(self) -> bool:
        """Stop serving and unbind all models. Return whether the server was running."""
        atexit.unregister(self.stop)
        was_running = self.is_connected()
        self._host.stop()
        for name in {name for name, _ in self._host.bound}:
            self._host.unbind(name)
        return was_running

    def is_alive(self) -> bool:
        """Return whether the server and this program's models run."""
        return self._host.is_alive()

    def is_connected(self) -> bool:
        """Return whether the server was started and has not ended."""
        return self._host.is_alive() and bool(self._host.addresses)

    def _log_urls(self, only: str | None = None) -> None:
        for name, _ in self._host.bound:
            if only in {None, name}:
                logger.info("Infer function available as model: `%s`", MODEL_URL.format(model_name=name))
                for what, url in _URLS:
                    logger.info("  %-15s `%s`", what, url.format(model_name=name))

    def _stop_at_exit(self) -> None:
        """Stop at exit, so that a program without ``stop()`` finishes queued requests."""
        atexit.unregister(self.stop)
        atexit.register(self.stop)


class Triton(TritonBase):
    """A server in this program.

    Args:
        config: Options, which override options in the environment.
        workspace: Accepted and ignored; no file is written.
        triton_lifecycle_policy: Whether ``with`` starts the server.
        security_config: Endpoints that need a token; by default those that change or watch the server.

    Raises:
        PyTritonValidationError: if an option is invalid, or gpuserve refuses it.
    """

    @explained
    def __init__(
        self,
        *,
        config: TritonConfig | None = None,
        workspace: Workspace | str | Path | None = None,
        triton_lifecycle_policy: TritonLifecyclePolicy | None = None,
        security_config: TritonSecurityConfig | None = None,
    ) -> None:
        self._config = merged_configs(TritonConfig.from_env(), config)
        self._policy = triton_lifecycle_policy or DefaultTritonLifecyclePolicy
        self._security = security_config or TritonSecurityConfig()
        settings = server_settings(self._config, self._security)
        with pytriton_errors():
            super().__init__(Server(settings), workspace)
        self._triton_server = self._host  # programs call its is_alive()
        if unused := ineffective_options(self._config):
            text = "These options of TritonConfig have no effect with gpuserve: %s."
            logger.warning(text, ", ".join(unused))

    def __enter__(self) -> Self:
        if self._policy.launch_triton_on_startup:
            self.run()
        return self

    def run(self) -> None:
        """Start, and return when every model is served. Do nothing if the server runs. From then on SIGTERM
        ends the program with status 0, after queued requests, unless the program has a handler for it. Raise
        PyTritonRuntimeError if a port is taken or a model could not be loaded.
        """
        if self.is_connected():
            return
        with pytriton_errors():
            self._host.run()
        self._stop_at_exit()
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _exit)
        self._warn_verbose()

    def connect(self) -> None:
        """Wait until the server that another thread starts is ready; raise TimeoutError if none does."""
        if not self._host.is_alive():
            text = "Triton Inference Server is not ready: it was not started; call run() or serve()"
            raise TimeoutError(text)
        self.run()

    def serve(self, monitoring_period_s: float = MONITORING_PERIOD_S) -> None:
        """Start the server unless it runs, and block until SIGINT, SIGTERM or ``stop()``; the period is
        ignored. Raise PyTritonUnrecoverableError if a callable raised it, which has ended the server, or as
        ``run``.
        """
        if not self.is_connected():
            self._stop_at_exit()
            self._warn_verbose()
        if signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # serve() has a handler of its own
        with pytriton_errors():
            self._host.serve()
        self._warn_verbose()

    def stop(self) -> bool:
        """Finish queued requests and stop the server. Return False if the server was not running."""
        was_running = super().stop()
        if was_running:
            self._warn_verbose()
        return was_running

    def get_access_token(self) -> str | None:
        """Return the token of the restricted endpoints, or None without restricted endpoints."""
        return self._security.access_token

    def _warn_verbose(self) -> None:
        if self._config.log_verbose:
            logger.warning(_VERBOSE, self._config.log_verbose)


def _exit(number: int, frame: object) -> None:
    sys.exit(0)  # ``stop`` runs at exit


class RemoteTriton(TritonBase):
    """The models of this program, served by a server that another program of this user runs on this machine.

    Args:
        url: One of the server's ports: "localhost", "http://localhost:8000", "grpc://localhost:8001".
        workspace: Accepted and ignored; no file is written.
        access_token: Accepted and ignored; the operating system identifies the program's user.

    Raises:
        PyTritonClientInvalidUrlError: if the url is invalid, or names another machine.
    """

    @explained
    def __init__(
        self, url: str, workspace: Workspace | str | Path | None = None, access_token: str | None = None
    ) -> None:
        try:
            host = AttachedServer(url, timeout_s=DEFAULT_TRITON_STARTUP_TIMEOUT_S)
        except AttachError as error:
            raise PyTritonClientInvalidUrlError(str(error)) from error
        super().__init__(host, workspace)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def connect(self) -> None:
        """Attach to the server with this program's models; raise TimeoutError if no server accepts them."""
        with pytriton_errors():
            self._host.run()
        self._stop_at_exit()

    def serve(self, monitoring_period_s: float = MONITORING_PERIOD_S) -> None:
        """Attach unless attached, and block until SIGINT, SIGTERM, ``stop()`` or the end of the server. Raise
        as ``connect``, or PyTritonUnrecoverableError if a callable raised it.
        """
        self.connect()
        with pytriton_errors():
            try:
                self._host.serve()
            except AttachError as error:  # the end of the server is no error
                logger.warning("%s", error)

    def is_alive(self) -> bool:
        """Return whether every model of this program is served. True without any model."""
        return not self._has_models or self._host.is_alive()


#: Kinds of callables that run several batches at once by default.
_OVERLAPPING_KINDS: Final = YIELDING | {CallableKind.COROUTINE}


def bound_spec(
    model_name: str,
    infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    model_version: int,
    config: ModelConfig | None,
    strict: bool,
    isolation: str,
) -> ModelSpec:
    """Return the model spec of ``bind``'s arguments, by PyTriton's rules of accepted values, concurrent
    batches and error texts. Raise as ``ModelHost.bind``. A warm-up that cannot run is logged and left out.
    """
    without_warmups = config
    if isinstance(config, ModelConfig):
        without_warmups = copy.copy(config)
        without_warmups.model_warmup = None
    callables = infer_func if isinstance(infer_func, Sequence) else [infer_func]
    overlapping = [one for one in callables if callable(one) and kind_of(one) in _OVERLAPPING_KINDS]
    asked = [one for one in overlapping if isinstance(getattr(one, "concurrency", None), int)]
    is_decoupled = isinstance(config, ModelConfig) and config.decoupled
    # 1 if not decoupled, as PyTriton; otherwise the default, or the callable's own.
    concurrency = None if is_decoupled or asked or not overlapping else 1
    more = (EXACT if strict else False, isolation, concurrency)
    spec = model_spec(model_name, infer_func, inputs, outputs, model_version, without_warmups, *more)
    declared = config.model_warmup if isinstance(config, ModelConfig) else None
    found: list[Any] = []
    for one in declared or ():
        try:
            found.append(warmup_as_given(one, spec.inputs))
        except BadModelConfig as error:
            logger.warning("left out a warm-up of model %s: %s", spec.name, error)
    return dataclasses.replace(spec, all_lines=True, warmup=tuple(found))
