"""Which pods come and go: a Deployment with its replica sets, and evictions by a disruption budget.

Pure: pods as values in, numbers and names out. The rules are those of Kubernetes' own controllers. A pod that
was deleted counts for nothing any more, although it may serve for a while yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.rollout.manifest import Manifest


class PodView(NamedTuple):
    """A pod that was not deleted, as the controllers see it."""

    name: str
    release: str
    ready: bool
    available: bool
    created: float


class Changes(NamedTuple):
    """``create``: the release of each new pod. ``delete``: names."""

    create: list[str]
    delete: list[str]


class Deployment:
    """How many pods of each release there are to be; ``manifest`` is the newest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        #: By release, the oldest first; the newest may be anywhere, after a rollback.
        self._wanted: dict[str, int] = {manifest.template.release: manifest.replicas}

    def apply(self, manifest: Manifest) -> None:
        """From now on this is what is wanted; a release that was there before is wanted again."""
        self.manifest = manifest
        self._wanted.setdefault(manifest.template.release, 0)

    @property
    def release(self) -> str:
        """The newest release."""
        return self.manifest.template.release

    def reconcile(self, pods: Sequence[PodView]) -> Changes:
        """One round: resize the replica sets, then let each have its number of pods."""
        if not self._grow():
            self._shrink(pods)
        changes = Changes([], [])
        for release, wanted in self._wanted.items():
            mine = [pod for pod in pods if pod.release == release]
            changes.create.extend([release] * (wanted - len(mine)))
            surplus = sorted(mine, key=_first_to_go)[: max(0, len(mine) - wanted)]
            changes.delete.extend(pod.name for pod in surplus)
        return changes

    def complete(self, pods: Sequence[PodView]) -> bool:
        """Every pod is of the newest release, and available."""
        available = [pod for pod in pods if pod.release == self.release and pod.available]
        return len(pods) == len(available) == self.manifest.replicas

    def _grow(self) -> bool:
        """More of the newest, as far as the surge allows."""
        most = self.manifest.replicas + self.manifest.strategy.max_surge
        missing = self.manifest.replicas - self._wanted[self.release]
        n_more = min(missing, most - sum(self._wanted.values()))
        if n_more > 0:
            self._wanted[self.release] += n_more
        return n_more > 0

    def _shrink(self, pods: Sequence[PodView]) -> None:
        """Fewer of the old ones, as long as enough pods are available; first those that are not."""
        least = self.manifest.replicas - self.manifest.strategy.max_unavailable
        n_new = sum(pod.available for pod in pods if pod.release == self.release)
        n_coming = self._wanted[self.release] - n_new
        most = sum(self._wanted.values()) - least - n_coming
        if most <= 0:
            return
        self._drop_broken(pods, most)
        n_spare = sum(pod.available for pod in pods) - least
        for release in self._old():
            n_less = max(0, min(self._wanted[release], n_spare))
            self._wanted[release] -= n_less
            n_spare -= n_less

    def _drop_broken(self, pods: Sequence[PodView], most: int) -> None:
        """Old pods that serve nobody go first."""
        n_dropped = 0
        for release in self._old():
            n_available = sum(pod.available for pod in pods if pod.release == release)
            n_less = max(0, min(self._wanted[release] - n_available, most - n_dropped))
            self._wanted[release] -= n_less
            n_dropped += n_less

    def _old(self) -> list[str]:
        return [release for release, n in self._wanted.items() if release != self.release and n]


def may_evict(manifest: Manifest, pods: Sequence[PodView]) -> bool:
    """Whether the disruption budget lets one more healthy pod go."""
    return sum(pod.ready for pod in pods) > manifest.replicas - manifest.max_disrupted


def _first_to_go(pod: PodView) -> tuple[bool, bool, float]:
    """Those that serve least, and of these the youngest."""
    return pod.ready, pod.available, -pod.created
