"""``Server``: the Python API. ``bind()`` turns callables of this program into models, each instance in
a worker process of its own; ``run()`` and ``serve()`` start and keep the server.

The supervisor runs in a thread of this program; no inference runs in it unless
``isolation="thread"`` asks for that. What ``Server`` shares with ``AttachedServer`` is in
``model_host.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from gpuserve.access import check_access
from gpuserve.attaching import ATTACH_TIMEOUT_S, AttachedServer
from gpuserve.model_host import ModelHost, Runner
from gpuserve.settings import ServerSettings
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.observer import SilentObserver
from gpuserve.supervisor.supervisor import Supervisor


class Server(ModelHost):
    """A server in this program::

        with Server(http_port=8000) as server:
            server.bind(model_name="linear", infer_func=infer, inputs=[…], outputs=[…])
            server.serve()

    Its methods may be called from any thread. After ``stop()``, which finishes what is queued, it can be
    run again, with its models.

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
        ConfigError: the settings of headers and restricted endpoints cannot be.
    """

    def __init__(self, settings: ServerSettings | None = None, **overrides: Any) -> None:
        super().__init__()
        _check_names(overrides)
        self._settings = dataclasses.replace(settings or ServerSettings(), **overrides)
        check_access(self._settings)

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

    def _new_runner(self, models: Sequence[ModelSpec]) -> Runner:
        return Supervisor(self._settings, models, SilentObserver(), relay_output=False)


def _check_names(overrides: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(ServerSettings)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f", expected one of {', '.join(known)}"
            raise TypeError(f"Server has no setting {name!r}{meant}")
