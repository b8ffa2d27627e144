"""One run from its start to its end: pods, Envoy, load, scenarios."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.rollout import clients
from benchmarks.rollout.cluster import Cluster
from benchmarks.rollout.endpoints import Endpoints
from benchmarks.rollout.envoy import Envoy
from benchmarks.rollout.load import Client, Load
from benchmarks.rollout.manifest import Manifest, read
from benchmarks.rollout.outcomes import Outcomes
from benchmarks.rollout.probes import Probe
from benchmarks.rollout.release import NAME, Patch, Releases
from benchmarks.rollout.report import Findings
from benchmarks.rollout.scenarios import Stage

#: Below those that connections get, and on addresses of their own.
PORTS: Final = {"http_port": 18000, "grpc_port": 18001, "metrics_port": 18002}
#: Pods that end while others run: with a grace period of a minute, and one that starts each five seconds.
_ENDING: Final = 12
_FIRST_ADDRESS: Final = 10
_WARM_REQUESTS: Final = 100
_START_TIMEOUT_S: Final = 120.0
#: Starts of a container that cannot load: the second comes at once, the fourth after half a minute.
_QUICK_TRIES: Final = 2
_TRIES: Final = 4
#: For tests: what waits in a rollout is shorter, and the YAML says so, as the overlay of a user would.
_CONTAINER: Final = "/spec/template/spec/containers/0"
QUICK: Final[Patch] = (
    {"op": "replace", "path": "/spec/minReadySeconds", "value": 1},
    {"op": "replace", "path": f"{_CONTAINER}/startupProbe/periodSeconds", "value": 1},
    {"op": "replace", "path": f"{_CONTAINER}/readinessProbe/periodSeconds", "value": 1},
    {"op": "replace", "path": f"{_CONTAINER}/lifecycle/preStop/sleep/seconds", "value": 3},
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line said. ``folder`` gets the logs."""

    rollouts: int
    drains: int
    kills: int
    failed_releases: int
    replicas: int
    rate_per_s: float
    max_delay_s: float
    seed: int
    quick: bool
    #: Of ``server`` in the config.
    settings: Mapping[str, float | str]
    folder: Path


async def run(options: Options, say: Callable[[str], None]) -> Findings:
    """Do everything, and say what came of it.

    Raises:
        Stuck: pods did not come or go as they should.
        ExportFailed, ManifestError: the YAML cannot be had, or asks for what is not known here.
    """
    random = Random(options.seed)
    releases = Releases(
        options.folder, options.replicas, {**PORTS, **options.settings}, QUICK if options.quick else ()
    )
    manifest = read(releases.render(1))
    endpoints = Endpoints(options.max_delay_s, random)
    addresses = _addresses(manifest)
    cluster = Cluster(manifest, options.folder, endpoints, addresses, random)
    outcomes, stage = Outcomes(), Stage(cluster, releases, random, say)
    async with cluster.running():
        await cluster.until(cluster.complete, "the first release", _START_TIMEOUT_S)
        async with _envoy(releases.config(1), endpoints, options.folder) as proxied:
            direct = clients.direct(addresses, PORTS["http_port"], PORTS["grpc_port"], endpoints, random)
            load = Load(options.rate_per_s, [*direct, *proxied], outcomes, random)
            async with load.running():
                await cluster.until(lambda: len(outcomes.all) > _WARM_REQUESTS, "load", _START_TIMEOUT_S)
                await _play(stage, options)
                await cluster.until(cluster.quiet, "the last pods", _START_TIMEOUT_S)
    about = _about(options, manifest)
    return Findings(about, stage.steps, outcomes, load.failures, load.n_sent_again, cluster.journal)


async def _play(stage: Stage, options: Options) -> None:
    await stage.rollouts(options.rollouts)
    await stage.drains(options.drains)
    for _ in range(options.failed_releases):
        await stage.failed_release(_QUICK_TRIES if options.quick else _TRIES)
    await stage.crashes(options.kills)


@contextlib.asynccontextmanager
async def _envoy(config: Path, endpoints: Endpoints, folder: Path) -> AsyncIterator[list[Client]]:
    """Clients of an Envoy that hears of the endpoints as all others do."""
    http_port, grpc_port, admin_port = _free_ports(3)
    (folder / "envoy").mkdir()
    envoy = Envoy(config, NAME, folder / "envoy", {"http": http_port, "grpc": grpc_port}, admin_port)
    envoy.take(endpoints.now)
    endpoints.subscribe(envoy.take)
    async with envoy.running():
        yield clients.through_envoy(envoy.address, http_port, grpc_port)


def _addresses(manifest: Manifest) -> list[str]:
    """Of the loopback device, and of this process alone."""
    count = manifest.replicas + manifest.strategy.max_surge + _ENDING
    network = f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
    return [f"{network}.{_FIRST_ADDRESS + number}" for number in range(count)]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _about(options: Options, manifest: Manifest) -> dict[str, str]:
    container, strategy = manifest.template.container, manifest.strategy
    kernel = platform.release().partition("-")[0]
    return {
        "Machine": f"{os.cpu_count()} cores, Linux {kernel}, Python {platform.python_version()}",
        "Load": f"{options.rate_per_s:g} requests a second, Poisson, open loop, seed {options.seed}",
        "Pods": f"{manifest.replicas}, maxSurge {strategy.max_surge}, maxUnavailable "
        f"{strategy.max_unavailable}, minReadySeconds {manifest.min_ready_s:g}"
        + (" (an overlay with shorter times)" if options.quick else " (as exported)"),
        "End of a pod": f"preStop {container.pre_stop_s:g} s, grace period {manifest.template.grace_s:g} s",
        "Settings": ", ".join(f"{key}: {value}" for key, value in options.settings.items()) or "the defaults",
        "Probes": ", ".join(
            f"{name} each {probe.period_s:g} s ({probe.failure_threshold} failures)"
            for name, probe in _probes(manifest).items()
        ),
        "Endpoint list": f"each change reaches each client and Envoy after 0 to {options.max_delay_s:g} s",
    }


def _probes(manifest: Manifest) -> dict[str, Probe]:
    container = manifest.template.container
    named = {"startup": container.startup, "readiness": container.readiness, "liveness": container.liveness}
    return {name: probe for name, probe in named.items() if probe is not None}
