"""``Server``: the Python API. ``bind()`` turns callables of this program into models, each instance in
a worker process of its own; ``run()`` and ``serve()`` start and keep the server.

The supervisor runs in a thread of this program; no inference runs in it unless
``isolation="thread"`` asks for that. What ``Server`` shares with ``AttachedServer`` is in
``model_host.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from gpuserve.api.attached_server import ATTACH_TIMEOUT_S, AttachedServer
from gpuserve.api.model_host import ModelHost, Runner
from gpuserve.config.settings.checks import checked_settings
from gpuserve.config.settings.keywords import ServerKeywords
from gpuserve.config.settings.server import ServerSettings
from gpuserve.model.build import ensemble_spec
from gpuserve.model.declaration import Step, Tensor
from gpuserve.model.options import nearest
from gpuserve.model.rules import check_members
from gpuserve.model.spec import ModelSpec
from gpuserve.placement.server_devices import ServerDevices
from gpuserve.supervisor.core.server_life import ServerObserver
from gpuserve.supervisor.supervisor import Supervisor


class Server(ModelHost):
    """A server in this program::

        with Server(http_port=8000) as server:
            server.bind(model_name="linear", infer_func=infer, inputs=[…], outputs=[…])
            server.serve()

    Its methods may be called from any thread. After ``stop()``, which finishes what is queued, it can be
    run again, with its models.

    Args:
        settings: all settings in one; the keyword arguments replace single ones. They are the fields of
            ``ServerSettings`` (``gpuserve/config/settings/server.py``, which describes each), and the keys of
            ``server`` in docs/reference.md: ``host``, ``http_port``, ``grpc_port`` and so on. A port 0 picks
            a free one, None switches it off.

    Raises:
        TypeError: a keyword argument is no setting.
        ConfigError: the settings of headers, access, TLS, tracing, rates, the transport or
            model control cannot be.
    """

    _replaces = True

    def __init__(self, settings: ServerSettings | None = None, **overrides: Unpack[ServerKeywords]) -> None:
        super().__init__()
        _check_names(overrides)
        given: Mapping[str, Any] = overrides  # a time may be a text, until it is checked
        self._settings = checked_settings(dataclasses.replace(settings or ServerSettings(), **given))
        self._devices = ServerDevices(numa_affinity=self._settings.numa_affinity)

    @property
    def settings(self) -> ServerSettings:
        """What it was told besides its models."""
        return self._settings

    @classmethod
    def attach(cls, url: str, *, timeout_s: float = ATTACH_TIMEOUT_S) -> AttachedServer:
        """Attach to a server that another program of this user runs on this machine; see ``AttachedServer``.

        Args:
            url: one of its ports: "localhost:8000", "http://localhost:8000" or "grpc://localhost:8001".
            timeout_s: how long to wait for it to come up, in seconds.

        Raises:
            AttachError: the url is wrong, or no server takes this program in time.
        """
        attached = AttachedServer(url, timeout_s=timeout_s)
        attached.run()
        return attached

    def ensemble(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        steps: Sequence[Step],
        *,
        version: int = 1,
        max_batch_size: int = 0,
    ) -> None:
        """Serve several models as one: each step asks a model for what its inputs, or earlier steps, give it.

        Steps run as soon as what they read is there. Large tensors go from worker to worker in shared memory.
        The models of the steps are bound to this server too; before the ensemble, where the server runs.

        Args:
            inputs, outputs: the ensemble's own, without the batch axis where it batches.
            steps: which models are asked, in any order.
            max_batch_size: the most rows of a request; 0: the ensemble's shapes are complete.

        Raises:
            BindError: it cannot be served: the text names the place.
        """
        spec = ensemble_spec(name, inputs, outputs, steps, version, max_batch_size)
        if self.is_alive():
            check_members([*self._specs.values(), spec])
        self.add(spec)

    def _new_runner(self, models: Sequence[ModelSpec]) -> Runner:
        check_members(models)
        return Supervisor(self._settings, models, ServerObserver(), relay_output=False, devices=self._devices)


def _check_names(overrides: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(ServerSettings)]
    for name in overrides:
        if name not in known:
            meant = nearest(name, known) or f", expected one of {', '.join(known)}"
            raise TypeError(f"Server has no setting {name!r}{meant}")
