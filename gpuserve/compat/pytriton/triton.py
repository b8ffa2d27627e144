"""``Triton`` and ``RemoteTriton``: PyTriton's server over ``gpuserve.Server`` and ``AttachedServer``.
Inference callables stay in the calling process, in a thread each, as PyTriton's do: programs share objects
between them, and keep what cannot be pickled. ``GPUSERVE_ISOLATION=process`` gives each a process.
"""

from __future__ import annotations

import abc
import atexit
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from gpuserve.api.model_host import ModelHost
from gpuserve.api.notebook_html import server_html, server_text
from gpuserve.api.server import AttachedServer, Server
from gpuserve.compat.pytriton.bound import bound_spec
from gpuserve.compat.pytriton.client.exceptions import PyTritonClientInvalidUrlError
from gpuserve.compat.pytriton.constants import DEFAULT_TRITON_STARTUP_TIMEOUT_S
from gpuserve.compat.pytriton.exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from gpuserve.compat.pytriton.security import (
    DEFAULT_PROTECTED_ENDPOINTS,
    TRITON_ACCESS_HEADER,
    VALID_TRITON_ENDPOINTS,
    TritonSecurityConfig,
)
from gpuserve.compat.pytriton.server_options import server_settings, without_effect
from gpuserve.compat.pytriton.translation import pytriton_errors
from gpuserve.compat.pytriton.triton_config import TritonConfig, merged
from gpuserve.compat.pytriton.utils.workspace import Workspace
from gpuserve.core.errors import AttachError
from gpuserve.model.declaration import ModelConfig, Tensor

__all__ = [
    "DEFAULT_PROTECTED_ENDPOINTS",
    "GROWTH_BACKEND_SHM_SIZE",
    "INITIAL_BACKEND_SHM_SIZE",
    "MODEL_CONFIG_URL",
    "MODEL_INFER_URL",
    "MODEL_READY_URL",
    "MODEL_URL",
    "MONITORING_PERIOD_S",
    "TRITONSERVER_DIST_DIR",
    "TRITON_ACCESS_HEADER",
    "VALID_TRITON_ENDPOINTS",
    "WAIT_FORM_MODEL_TIMEOUT_S",
    "DefaultTritonLifecyclePolicy",
    "RemoteTriton",
    "Triton",
    "TritonBase",
    "TritonConfig",
    "TritonLifecyclePolicy",
    "TritonSecurityConfig",
    "VertextAILifecyclePolicy",
]

logger = logging.getLogger(__name__)

MONITORING_PERIOD_S: Final = 10.0
WAIT_FORM_MODEL_TIMEOUT_S: Final = 60.0
MODEL_URL: Final = "/v2/models/{model_name}"
MODEL_READY_URL: Final = f"{MODEL_URL}/ready"
MODEL_CONFIG_URL: Final = f"{MODEL_URL}/config"
MODEL_INFER_URL: Final = f"{MODEL_URL}/infer"
#: Of the Triton binary, which there is none of: for programs that import the names.
INITIAL_BACKEND_SHM_SIZE: Final = 4 << 20
GROWTH_BACKEND_SHM_SIZE: Final = 1 << 20
TRITONSERVER_DIST_DIR: Final = Path("tritonserver")

#: "thread" or "process": where inference callables run.
ISOLATION_VARIABLE: Final = "GPUSERVE_ISOLATION"
_VERBOSE: Final = (
    "Triton Inference Server is running with enabled verbose logs (log_verbose_level=%d). "
    "It may affect inference performance."
)


@dataclass
class TritonLifecyclePolicy:
    """Whether ``with Triton()`` starts the server, or ``run()`` does. There is no model store to choose."""

    launch_triton_on_startup: bool = True
    local_model_store: bool = False


DefaultTritonLifecyclePolicy: Final = TritonLifecyclePolicy()
VertextAILifecyclePolicy: Final = TritonLifecyclePolicy(False, True)


class TritonBase(abc.ABC):
    """What ``Triton`` and ``RemoteTriton`` have in common: models over a ``ModelHost``."""

    def __init__(self, host: ModelHost, workspace: Workspace | str | Path | None) -> None:
        self._host = host
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

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
        """Serve a callable under a name; ``ModelHost.bind`` says what the arguments are.

        Raises:
            PyTritonValidationError: the name, a tensor or the callable cannot be served.
            PyTritonInvalidOperationError: the name is bound already.
            PyTritonBadParameterError: a value of ``config`` cannot be.
            PyTritonRuntimeError: where the server runs, the model could not be loaded.
        """
        if trace_config:
            raise PyTritonValidationError(
                "bind(trace_config=…) is not supported by gpuserve: give it to TritonConfig, which is for "
                "all models, and change it for one by the trace settings of the protocol"
            )
        if any(
            (name.lower(), version) == (model_name.lower(), model_version)
            for name, version in self._host.bound
        ):
            raise PyTritonInvalidOperationError(
                f"Cannot add model with the same name twice: {model_name!r} is bound already"
            )
        isolation = os.environ.get(ISOLATION_VARIABLE) or "thread"
        with pytriton_errors():
            spec = bound_spec(
                model_name, infer_func, inputs, outputs, model_version, config, strict, isolation
            )
            self._host.add(spec, infer_func)

    @abc.abstractmethod
    def connect(self) -> None:
        """Return when the server has this program's models."""

    def __repr__(self) -> str:
        return server_text(type(self).__name__, self._host.declared, self._host.addresses)

    def _repr_html_(self) -> str:
        return server_html(type(self).__name__, self._host.declared, self._host.addresses)

    @abc.abstractmethod
    def serve(self, monitoring_period_s: float = MONITORING_PERIOD_S) -> None:
        """Start, and block until SIGINT, SIGTERM or ``stop()``."""

    def stop(self) -> bool:
        """End what this program serves, and forget its models; whether there was something to end."""
        atexit.unregister(self.stop)
        was_running = self.is_connected()
        self._host.stop()
        for name in {name for name, _ in self._host.bound}:
            self._host.unbind(name)
        return was_running

    def is_alive(self) -> bool:
        """Whether the server and this program's models run."""
        return self._host.is_alive()

    def is_connected(self) -> bool:
        """Whether the server has been started, and has not ended."""
        return self._host.is_alive() and bool(self._host.addresses)

    def _stop_at_exit(self) -> None:
        """A program that ends without ``stop()`` finishes what is queued."""
        atexit.unregister(self.stop)
        atexit.register(self.stop)


class Triton(TritonBase):
    """A server in this program.

    Args:
        config: its options, over those in the environment.
        workspace: accepted; no file is written.
        triton_lifecycle_policy: whether ``with`` starts it.
        security_config: which endpoints need a token; by default those that change or watch the server.

    Raises:
        PyTritonValidationError: an option cannot be, or is none of gpuserve's.
    """

    def __init__(
        self,
        *,
        config: TritonConfig | None = None,
        workspace: Workspace | str | Path | None = None,
        triton_lifecycle_policy: TritonLifecyclePolicy | None = None,
        security_config: TritonSecurityConfig | None = None,
    ) -> None:
        self._config = merged(TritonConfig.from_env(), config)
        self._policy = triton_lifecycle_policy or DefaultTritonLifecyclePolicy
        self._security = security_config or TritonSecurityConfig()
        settings = server_settings(self._config, self._security)
        with pytriton_errors():
            super().__init__(Server(settings), workspace)
        self._triton_server = self._host  # programs look there whether it is alive
        if unused := without_effect(self._config):
            logger.warning(
                "These options of TritonConfig have no effect with gpuserve: %s.", ", ".join(unused)
            )

    def __enter__(self) -> Self:
        if self._policy.launch_triton_on_startup:
            self.run()
        return self

    def run(self) -> None:
        """Start, and return when every model is served. Does nothing when it runs.

        Raises:
            PyTritonRuntimeError: a port is taken, or a model could not be loaded.
        """
        if self.is_connected():
            return
        with pytriton_errors():
            self._host.run()
        self._stop_at_exit()
        self._warn_verbose()

    def connect(self) -> None:
        """Return when the server that another thread starts is ready.

        Raises:
            TimeoutError: nobody has started it.
        """
        if not self._host.is_alive():
            raise TimeoutError(
                "Triton Inference Server is not ready: it was not started; call run() or serve()"
            )
        self.run()

    def serve(self, monitoring_period_s: float = MONITORING_PERIOD_S) -> None:
        """Start if it does not run, and block until SIGINT, SIGTERM or ``stop()``.

        Args:
            monitoring_period_s: accepted; the end of the server is noticed at once.

        Raises:
            PyTritonUnrecoverableError: a callable raised it, and the server has ended.
            PyTritonRuntimeError: see ``run``.
        """
        if not self.is_connected():
            self._stop_at_exit()
            self._warn_verbose()
        with pytriton_errors():
            self._host.serve()
        self._warn_verbose()

    def stop(self) -> bool:
        """Finish what is queued and end the server; False where it did not run."""
        was_running = super().stop()
        if was_running:
            self._warn_verbose()
        return was_running

    def get_access_token(self) -> str | None:
        """The token of the restricted endpoints; None where there are none."""
        return self._security.access_token

    def _warn_verbose(self) -> None:
        if self._config.log_verbose:
            logger.warning(_VERBOSE, self._config.log_verbose)


class RemoteTriton(TritonBase):
    """Models of this program, served by a server that another program of this user runs on this machine.

    Args:
        url: one of the server's ports: "localhost", "http://localhost:8000", "grpc://localhost:8001".
        workspace: accepted; no file is written.
        access_token: accepted; the operating system tells the server whose program this is.

    Raises:
        PyTritonClientInvalidUrlError: the url is wrong, or names another machine.
    """

    def __init__(
        self, url: str, workspace: Workspace | str | Path | None = None, access_token: str | None = None
    ) -> None:
        try:
            host = AttachedServer(url, timeout_s=DEFAULT_TRITON_STARTUP_TIMEOUT_S)
        except AttachError as error:
            raise PyTritonClientInvalidUrlError(str(error)) from error
        super().__init__(host, workspace)
        self._has_models = False

    def __enter__(self) -> Self:
        self.connect()
        return self

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
        """Serve a callable under a name, from now on where it is connected; see ``TritonBase.bind``."""
        super().bind(model_name, infer_func, inputs, outputs, model_version, config, strict, trace_config)
        self._has_models = True

    def connect(self) -> None:
        """Attach to the server, and return when it has this program's models.

        Raises:
            TimeoutError: it is not there, or does not take this program.
        """
        with pytriton_errors():
            self._host.run()
        self._stop_at_exit()

    def serve(self, monitoring_period_s: float = MONITORING_PERIOD_S) -> None:
        """Attach if it is not, and block until SIGINT, SIGTERM, ``stop()`` or the end of the server.

        Raises:
            TimeoutError: see ``connect``.
            PyTritonUnrecoverableError: a callable raised it.
        """
        self.connect()
        with pytriton_errors():
            try:
                self._host.serve()
            except AttachError as error:  # the server may end when it likes
                logger.warning("%s", error)

    def is_alive(self) -> bool:
        """Whether every model of this program is served; so it is where there is none."""
        return not self._has_models or self._host.is_alive()
