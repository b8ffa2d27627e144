"""What is done to the pods while requests come in: releases, drains, a release that fails, crashes.

Each scenario says step by step what it did, and when; what became of the requests meanwhile is for the load.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from random import Random
from typing import Final, NamedTuple

from benchmarks.rollout.cluster import Cluster, Stuck
from benchmarks.rollout.manifest import Manifest, read
from benchmarks.rollout.release import Releases

_TIMEOUT_S: Final = 300.0


class Scenario(Enum):
    """The value is its heading in the report."""

    ROLLOUTS = "rollouts"
    DRAINS = "single drains"
    FAILED_RELEASE = "a release that cannot load"
    CRASHES = "kill -9 of a whole pod"


class Step(NamedTuple):
    """One thing that was done. Times are of ``time.monotonic``."""

    scenario: Scenario
    began_s: float
    ended_s: float
    detail: str


class Stage:
    """What the scenarios have to do with. ``say`` is told of every step."""

    def __init__(
        self,
        cluster: Cluster,
        releases: Releases,
        random: Random,
        say: Callable[[str], None],
    ) -> None:
        self.cluster = cluster
        self.steps: list[Step] = []
        self._releases = releases
        self._random = random
        self._say = say
        self._numbers = itertools.count(2)  # the first runs already

    async def rollouts(self, count: int) -> None:
        """So many releases, one after the other; the last pods of one end while the next begins."""
        for number in range(1, count + 1):
            manifest = await self.render()
            await self._step(Scenario.ROLLOUTS, f"{number} of {count}", self._roll(manifest))

    async def drains(self, count: int) -> None:
        """One pod at a time is evicted, as soon as the disruption budget allows the next."""
        for number in range(1, count + 1):
            await self._until_healthy()
            name = self._random.choice(self.cluster.views()).name
            await self._step(Scenario.DRAINS, f"{number} of {count}: {name}", self._drain(name))

    async def failed_release(self, n_tries: int) -> None:
        """A release whose pods never become ready is applied, started so often, and taken back."""
        before = self.cluster.deployment.manifest
        broken = await self.render(broken=True)
        detail = f"{broken.template.release}, then back to {before.template.release}"
        await self._step(Scenario.FAILED_RELEASE, detail, self._fail(broken, before, n_tries))

    async def crashes(self, count: int) -> None:
        """All processes of a pod are killed at once; it comes back before the next."""
        for number in range(1, count + 1):
            await self._until_healthy()
            # The one that crashed least: a second crash of a container waits for its back-off.
            names = [pod.name for pod in self.cluster.views()]
            self._random.shuffle(names)
            name = min(names, key=lambda one: self.cluster.pod(one).n_starts)
            await self._step(Scenario.CRASHES, f"{number} of {count}: {name}", self._crash(name))

    async def render(self, *, broken: bool = False) -> Manifest:
        """Render the next release; returns its manifest."""
        number = next(self._numbers)
        return read(await asyncio.to_thread(self._releases.render, number, broken=broken))

    # ---- one step ---------------------------------------------------------------------------

    async def _step(self, scenario: Scenario, detail: str, act: Awaitable[None]) -> None:
        began_s = time.monotonic()
        await act
        step = Step(scenario, began_s, time.monotonic(), detail)
        self.steps.append(step)
        self._say(f"{scenario.value}: {detail}, {step.ended_s - began_s:.1f} s")

    async def _roll(self, manifest: Manifest) -> None:
        self.cluster.apply(manifest)
        await self.cluster.until(self.cluster.complete, "a rollout", _TIMEOUT_S)

    async def _drain(self, name: str) -> None:
        self.cluster.delete(name)
        await self._until_healthy()

    async def _fail(self, broken: Manifest, before: Manifest, n_tries: int) -> None:
        self.cluster.apply(broken)
        await self.cluster.until(lambda: self._n_starts(broken) >= n_tries, "a crash loop", _TIMEOUT_S)
        old = [
            pod for pod in self.cluster.views() if pod.release == before.template.release and pod.available
        ]
        if len(old) < before.replicas - before.strategy.max_unavailable:
            raise Stuck(f"a release that cannot load left {len(old)} pods of the old one")
        self.cluster.apply(before)
        await self.cluster.until(self.cluster.complete, "the way back", _TIMEOUT_S)

    def _n_starts(self, broken: Manifest) -> int:
        views = (pod for pod in self.cluster.views() if pod.release == broken.template.release)
        return sum(self.cluster.pod(pod.name).n_starts for pod in views)

    async def _crash(self, name: str) -> None:
        n_starts = self.cluster.pod(name).n_starts
        self.cluster.crash(name)
        await self.cluster.until(
            lambda: self.cluster.pod(name).n_starts > n_starts and self.cluster.pod(name).ready,
            "a container after a crash",
            _TIMEOUT_S,
        )

    async def _until_healthy(self) -> None:
        await self.cluster.until(self.cluster.may_evict, "all pods ready", _TIMEOUT_S)
