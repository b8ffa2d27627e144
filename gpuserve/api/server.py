"""The Python API. ``Server`` runs a server in this program, whose supervisor is a thread of this program;
``AttachedServer`` serves models of this program through a server that another program runs, whose front
communicates with the workers directly. Their common part is ``ModelHost`` (``model_host.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Unpack

from gpuserve.api.model_host import ModelHost, Runner
from gpuserve.config.settings.checks import checked_settings
from gpuserve.config.settings.keywords import ServerKeywords
from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.suggestions import explained, nearest
from gpuserve.model.build import ensemble_spec
from gpuserve.model.declaration import Step, Tensor
from gpuserve.model.options import by_own_names
from gpuserve.model.placement import ServerDevices
from gpuserve.model.rules import check_members
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.attach.attachment import Attachment
from gpuserve.supervisor.control.attach_protocol import port_of
from gpuserve.supervisor.processes.lifecycle import ServerObserver
from gpuserve.supervisor.supervisor import Supervisor

ATTACH_TIMEOUT_S: Final = 30.0


class AttachedServer(ModelHost):
    """A server of another program, with models of this one::

        with Server.attach("localhost:8000") as server:
            server.bind(model_name="linear", infer_func=infer, inputs=[…], outputs=[…])
            server.serve()

    The models are served from ``bind()`` on, until this program stops, ends or is killed. Waiting requests
    for them are then answered UNAVAILABLE; the server and its other models go on. A name that another
    attached program has bound is taken over from that program. Names of the server's own models cannot be
    used.

    ``serve()`` raises ``AttachError`` when the server ends. ``stop()`` withdraws the models; ``run()``
    attaches again with the models.

    Args:
        url: one of the server's ports: "localhost:8000", "http://localhost:8000", "grpc://localhost:8001".
        timeout_s: how long ``run()`` waits for the server to come up, in seconds.

    Raises:
        AttachError: the url is wrong, or names another machine.
    """

    #: A name is taken over from another program with all its versions.
    _one_version = True

    @explained
    def __init__(self, url: str, *, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
        super().__init__()
        self._port = port_of(url)
        self._timeout_s = timeout_s

    def is_connected(self) -> bool:
        """Return whether the server has accepted this program."""
        runner = self._runner
        return self.is_alive() and isinstance(runner, Attachment) and runner.is_connected

    def _new_runner(self, models: Sequence[ModelSpec]) -> Runner:
        return Attachment(self._port, models, self._timeout_s, self._forget)


class Server(ModelHost):
    """A server in this program::

        with Server(http_port=8000) as server:
            server.bind(model_name="linear", infer_func=infer, inputs=[…], outputs=[…])
            server.serve()

    Its methods may be called from any thread. ``stop()`` finishes queued requests. Afterwards the server can
    be run again, with its models.

    Args:
        settings: all settings in one object; the keyword arguments override single settings. They are the
            fields of ``ServerSettings`` (described in ``gpuserve/config/settings/server.py``) and the keys of
            ``server`` in docs/reference.md: ``host``, ``http_port``, ``grpc_port`` and so on. A port of 0
            chooses a free port, None switches the port off.

    Raises:
        TypeError: a keyword argument is not a setting.
        ConfigError: settings of headers, access, TLS, tracing, rates, the transport or model control are
            invalid or conflict with each other.
    """

    _replaces = True

    def __init__(self, settings: ServerSettings | None = None, **overrides: Unpack[ServerKeywords]) -> None:
        super().__init__()
        known = [field.name for field in dataclasses.fields(ServerSettings)]
        given = by_own_names(ServerSettings, overrides)  # durations may be texts until they are checked
        for name in given:
            if name not in known:
                meant = nearest(name, known) or f", expected one of {', '.join(known)}"
                raise TypeError(f"Server has no setting {name!r}{meant}")
        self._settings = checked_settings(dataclasses.replace(settings or ServerSettings(), **given))
        self._devices = ServerDevices(numa_affinity=self._settings.numa_affinity)

    @property
    def settings(self) -> ServerSettings:
        return self._settings

    @classmethod
    @explained
    def attach(cls, url: str, *, timeout_s: float = ATTACH_TIMEOUT_S) -> AttachedServer:
        """Attach to a server of another program; arguments and errors are those of ``AttachedServer.run``."""
        attached = AttachedServer(url, timeout_s=timeout_s)
        attached.run()
        return attached

    @explained
    def ensemble(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        steps: Sequence[Step],
        *,
        version: int = 1,
        max_batch_size: int = 0,
        decoupled: bool = False,
    ) -> None:
        """Serve several models as one: each step calls a model with inputs of the ensemble, or outputs of
        earlier steps.

        A step runs as soon as its inputs are available. Large tensors pass from worker to worker in shared
        memory. The models of the steps are bound to this server too; if the server runs, before the ensemble.

        Args:
            name: the name of the ensemble.
            inputs, outputs: the tensors of the ensemble, without the batch axis if it batches.
            steps: the calls of models, in any order.
            version: the version of the ensemble.
            max_batch_size: the maximum number of rows of a request; 0: shapes are complete, without a batch
                axis.
            decoupled: whether a request has any number of responses, those of a decoupled last step.

        Raises:
            BindError: the ensemble cannot be served; the text names the problem and its place.
        """
        spec = ensemble_spec(name, inputs, outputs, steps, version, max_batch_size, decoupled)
        if self.is_alive():
            check_members([*self._specs.values(), spec])
        self.add(spec)

    def _new_runner(self, models: Sequence[ModelSpec]) -> Runner:
        check_members(models)
        return Supervisor(self._settings, models, ServerObserver(), relay_output=False, devices=self._devices)
