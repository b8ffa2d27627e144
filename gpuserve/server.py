"""``Server``: the Python API. ``bind()`` turns callables of this program into models, each instance in
a worker process of its own; ``run()`` and ``serve()`` start and keep the server.

The supervisor runs in a thread of this program; no inference runs in it unless
``isolation="thread"`` asks for that. What ``Server`` shares with ``AttachedServer`` is in
``model_host.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gpuserve.access import check_access
from gpuserve.attaching import ATTACH_TIMEOUT_S, AttachedServer
from gpuserve.declared_ensemble import ensemble_spec
from gpuserve.devices.server_devices import ServerDevices
from gpuserve.ensembles import check_members
from gpuserve.errors import ConfigError
from gpuserve.model import Step, Tensor
from gpuserve.model_host import ModelHost, Runner
from gpuserve.rates import check_rate_settings
from gpuserve.settings import GRPC_COMPRESSIONS, ServerSettings
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.observer import SilentObserver
from gpuserve.supervisor.supervisor import Supervisor
from gpuserve.tls import check_tls, with_whole_paths
from gpuserve.trace_output import check_trace
from gpuserve.transports import check_transport


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
        health_port: a port that answers health alone, without TLS; None, the default, is none.
        transport: "native" or "h2corn" (both protocols on every port), or "grpcio" (grpc.aio for gRPC).
        name: the server's name in its metadata.
        drain_timeout_s: how long ``stop()`` finishes what is queued, in seconds.
        lame_duck_s: how long ``stop()`` goes on taking requests before that, while the server is not ready.
        max_connection_age_s: when a connection takes no more requests, in seconds; 0 is never.
        min_ready_instances: how many instances of each model must be up for the server to be ready.
        min_healthy_devices: how many of the GPUs that its models name must not be lost for that, too.
        gpu_health_interval_s: how often the GPUs are looked at, in seconds; 0 is never.
        load_timeout_s: how long a callable may take to load, in seconds; 0 is for ever.
        max_request_nbytes: the largest request body, in bytes.
        max_arena_nbytes: shared memory that the inputs of one model may take, in bytes.
        response_cache_nbytes: memory for the answers of models with a response cache, in bytes.
        shared_memory_owners: users (uid) whose system shared memory clients may register.
        grpc_response_compression: "none", "low", "medium" or "high".
        http_header_forward_pattern, grpc_header_forward_pattern: request headers that this regular
            expression is found in reach ``Request.parameters``.
        tls_certfile, tls_keyfile: PEM files of the certificate chain and its key, for TLS on every port.
        tls_client_ca: PEM file of the authorities that clients' own certificates must come from.
        tls_ports: which of "http", "grpc" and "metrics" speak TLS; all by default.
        restricted_endpoints, access_token: groups of endpoints that need the token.
        access_rules: more of that, as ``AccessRule``: which tokens open which groups.
        remote_control: groups whose control operations clients on other machines may ask for.
        admin_api: whether operators may see and control the server over HTTP, by ``/v2/admin/…``.
        model_control: "explicit" lets clients load and unload models; "none" does not.
        load_at_start: with "explicit", the names of the models that are loaded at the start; None is all.
        rate_limit, rate_limit_resources: "execution_count" lets instances run only while they have the
            resources that they declare; how much there is of them, as "name:count" or "name:count:device".
        numa_affinity: whether workers of a GPU keep to the CPUs and the memory beside it.
        attachable: whether other programs of this user may serve models through this server.
        metrics_summaries: whether the metrics page has quantiles of latencies.
        log_format, log_level: how the front process logs: "text" or "json"; "debug" to "error".
        trace: a ``TraceSettings``: how requests are traced.

    Raises:
        TypeError: a keyword argument is no setting.
        ConfigError: the settings of headers, access, TLS, tracing, rates, the transport or
            model control cannot be.
    """

    def __init__(self, settings: ServerSettings | None = None, **overrides: Any) -> None:
        super().__init__()
        _check_names(overrides)
        self._settings = dataclasses.replace(settings or ServerSettings(), **overrides)
        check_access(self._settings)
        check_rate_settings(self._settings)
        self._settings = with_whole_paths(self._settings, lambda _: os.getcwd())
        check_tls(self._settings)
        check_trace(self._settings.trace)
        _check_model_control(self._settings)
        _check_compression(self._settings)
        check_transport(self._settings.transport)
        self._devices = ServerDevices(numa_affinity=self._settings.numa_affinity)

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
        self._add(spec)

    def _new_runner(self, models: Sequence[ModelSpec]) -> Runner:
        check_members(models)
        return Supervisor(self._settings, models, SilentObserver(), relay_output=False, devices=self._devices)


def _check_model_control(settings: ServerSettings) -> None:
    if settings.model_control not in ("none", "explicit"):
        raise ConfigError(f"model_control must be 'none' or 'explicit', got {settings.model_control!r}")
    if settings.model_control == "none" and settings.load_at_start is not None:
        raise ConfigError("load_at_start needs model_control='explicit'; without it every model is loaded")


def _check_compression(settings: ServerSettings) -> None:
    level = settings.grpc_response_compression
    if level not in GRPC_COMPRESSIONS:
        known = ", ".join(GRPC_COMPRESSIONS)
        raise ConfigError(f"grpc_response_compression must be one of {known}, got {level!r}")


def _check_names(overrides: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(ServerSettings)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f", expected one of {', '.join(known)}"
            raise TypeError(f"Server has no setting {name!r}{meant}")
