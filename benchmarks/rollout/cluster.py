"""The shell around ``deployment.py``: pods come and go as it wants them, and the endpoint list follows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.rollout.deployment import Deployment, PodView, may_evict
from benchmarks.rollout.endpoints import Endpoints
from benchmarks.rollout.journal import Journal
from benchmarks.rollout.manifest import Manifest, PodTemplate
from benchmarks.rollout.node import RunningPod
from benchmarks.rollout.pod import Pod

_POLL_S: Final = 0.05


class Stuck(Exception):
    """What was waited for did not come about; the text says what it was."""


class Cluster:
    """A Deployment on this machine. ``addresses``: one for each pod that there may be, ending ones too."""

    def __init__(
        self, manifest: Manifest, folder: Path, endpoints: Endpoints, addresses: Sequence[str], random: Random
    ) -> None:
        self.journal = Journal()
        self.deployment = Deployment(manifest)
        self.addresses = tuple(addresses)
        self._folder = folder
        self._endpoints = endpoints
        self._random = random
        self._templates: dict[str, PodTemplate] = {}
        self._group: asyncio.TaskGroup
        self._pods: dict[str, RunningPod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        """Its pods start; at the end of the block all of them are killed."""
        async with asyncio.TaskGroup() as self._group:
            controller = self._group.create_task(self._control())
            try:
                yield self
            finally:
                for task in (controller, *self._tasks.values()):
                    task.cancel()

    # ---- what a user does -------------------------------------------------------------------

    def apply(self, manifest: Manifest) -> None:
        """Apply an object, as ``kubectl apply`` does."""
        self.deployment.apply(manifest)
        self._news.set()

    def delete(self, name: str) -> None:
        """As ``kubectl delete pod``; another one comes in its place."""
        self._pods[name].delete()
        self._news.set()

    def crash(self, name: str) -> None:
        """``kill -9`` of all processes of a pod at once."""
        self._pods[name].crash()

    # ---- what a user sees -------------------------------------------------------------------

    def views(self) -> list[PodView]:
        """The pods that were not deleted."""
        now, min_ready_s = time.monotonic(), self.deployment.manifest.min_ready_s
        pods = (one.pod for one in self._pods.values() if not one.pod.deleted)
        return [
            PodView(pod.name, pod.template.release, pod.ready, pod.available(now, min_ready_s), pod.created)
            for pod in pods
        ]

    def pod(self, name: str) -> Pod:
        return self._pods[name].pod

    def complete(self) -> bool:
        """Every pod is of the newest release and available."""
        return self.deployment.complete(self.views())

    def quiet(self) -> bool:
        """Nothing comes or goes any more."""
        return self.complete() and len(self._pods) == self.deployment.manifest.replicas

    def may_evict(self) -> bool:
        """Whether the disruption budget lets a pod go."""
        return may_evict(self.deployment.manifest, self.views())

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until it holds.

        Raises:
            Stuck: it did not within this time.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise Stuck(f"{what}: not within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    # ---- the controllers --------------------------------------------------------------------

    async def _control(self) -> None:
        while True:
            while self._reconcile():
                pass
            self._endpoints.publish([one.endpoint for one in self._pods.values() if one.pod.takes_requests])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._next_available_s())
            self._news.clear()

    def _reconcile(self) -> bool:
        """One round; whether it changed anything."""
        manifest = self.deployment.manifest
        self._templates[manifest.template.release] = manifest.template
        changes = self.deployment.reconcile(self.views())
        created = [self._create(self._templates[release]) for release in changes.create]
        for name in changes.delete:
            self._pods[name].delete()
        return any(created) or bool(changes.delete)

    def _create(self, template: PodTemplate) -> bool:
        """A pod on a free address; where there is none it waits, as for a node."""
        taken = {one.address for one in self._pods.values()}
        address = next((one for one in self.addresses if one not in taken), None)
        if address is None:
            return False
        name = f"{template.release.rpartition('-')[2]}-{next(self._numbers)}"
        pod = Pod(name, template, time.monotonic())
        running = RunningPod(pod, address, self._folder, self.journal, self._random, self._news.set)
        self._pods[name] = running
        self._tasks[name] = self._group.create_task(self._run(running))
        return True

    async def _run(self, running: RunningPod) -> None:
        try:
            await running.run()
        finally:
            del self._pods[running.pod.name]
            del self._tasks[running.pod.name]
            self._news.set()

    def _next_available_s(self) -> float | None:
        """Until a ready pod counts as available; None: nothing changes by itself."""
        now, min_ready_s = time.monotonic(), self.deployment.manifest.min_ready_s
        since = [one.pod.ready_since for one in self._pods.values() if one.pod.ready_since is not None]
        left_s = min((at + min_ready_s - now for at in since if at + min_ready_s > now), default=math.inf)
        return None if math.isinf(left_s) else left_s
