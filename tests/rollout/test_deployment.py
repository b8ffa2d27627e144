"""Which pods come and go in a rolling update: the rules of Kubernetes' Deployment, on pods of the test."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pods import manifest

from benchmarks.rollout.deployment import Changes, Deployment, PodView, may_evict


class Pods:
    """Pods that become ready and available when the test says so."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.pods: list[PodView] = []
        self._numbers = itertools.count(1)

    def reconcile(self) -> Changes:
        changes = self.deployment.reconcile(self.pods)
        gone = set(changes.delete)
        self.pods = [pod for pod in self.pods if pod.name not in gone]
        for release in changes.create:
            number = next(self._numbers)
            self.pods.append(PodView(f"{release}{number}", release, False, False, float(number)))
        return changes

    def settle(self) -> None:
        """Until nothing changes by itself."""
        for _ in range(100):
            if self.reconcile() == Changes([], []):
                return
        raise AssertionError("it never comes to an end")

    def serve(self, release: str, limit: int = 100) -> None:
        """So many of a release become available."""
        for at, pod in enumerate(self.pods):
            if pod.release == release and not pod.available and limit:
                self.pods[at] = pod._replace(ready=True, available=True)
                limit -= 1

    def of(self, release: str) -> int:
        return sum(pod.release == release for pod in self.pods)


def running(**rolling: int) -> Pods:
    """Release a, complete."""
    pods = Pods(Deployment(manifest("a", **rolling)))
    pods.settle()
    pods.serve("a")
    return pods


def test_the_first_release_starts_with_all_its_pods() -> None:
    pods = Pods(Deployment(manifest("a", replicas=3)))
    assert pods.reconcile().create == ["a", "a", "a"]
    assert not pods.deployment.complete(pods.pods)
    pods.serve("a")
    assert pods.deployment.complete(pods.pods)


def test_with_a_surge_of_one_a_new_pod_serves_before_an_old_one_leaves() -> None:
    pods = running(replicas=3, surge=1, unavailable=0)
    pods.deployment.apply(manifest("b", replicas=3, surge=1, unavailable=0))
    seen = []
    while not pods.deployment.complete(pods.pods):
        pods.settle()
        seen.append((pods.of("a"), pods.of("b")))
        pods.serve("b")
    assert seen == [(3, 1), (2, 2), (1, 3), (0, 3)]


def test_without_a_surge_an_old_pod_leaves_first() -> None:
    pods = running(replicas=2, surge=0, unavailable=1)
    pods.deployment.apply(manifest("b", replicas=2, surge=0, unavailable=1))
    first = pods.reconcile()
    assert (first.create, len(first.delete)) == ([], 1)
    assert pods.reconcile().create == ["b"]
    pods.settle()
    assert (pods.of("a"), pods.of("b")) == (1, 1)


def test_a_release_that_is_never_ready_takes_no_old_pod_away() -> None:
    pods = running(replicas=3)
    pods.deployment.apply(manifest("b", replicas=3))
    pods.settle()
    assert (pods.of("a"), pods.of("b")) == (3, 1)
    pods.deployment.apply(manifest("a", replicas=3))
    pods.settle()
    assert (pods.of("a"), pods.of("b")) == (3, 0)
    assert pods.deployment.complete(pods.pods)


def test_a_release_in_the_middle_of_a_rollout_takes_its_place() -> None:
    pods = running(replicas=3)
    pods.deployment.apply(manifest("b", replicas=3))
    pods.settle()
    pods.serve("b")
    pods.settle()
    pods.deployment.apply(manifest("c", replicas=3))
    pods.settle()
    # The pod of b that serves nobody yet goes first.
    assert (pods.of("a"), pods.of("b"), pods.of("c")) == (2, 1, 1)


def test_a_pod_that_was_deleted_is_replaced() -> None:
    pods = running(replicas=3)
    del pods.pods[1]
    assert pods.reconcile() == Changes(["a"], [])


def test_an_eviction_waits_until_the_last_one_is_made_good() -> None:
    pods = running(replicas=3)
    assert may_evict(pods.deployment.manifest, pods.pods)
    del pods.pods[0]
    pods.settle()
    assert not may_evict(pods.deployment.manifest, pods.pods)
    pods.serve("a")
    assert may_evict(pods.deployment.manifest, pods.pods)


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["serve", "settle", "release"]), st.integers(1, 3)), max_size=30),
)
def test_at_no_time_are_there_too_many_or_too_few(
    replicas: int, surge: int, unavailable: int, steps: list[tuple[str, int]]
) -> None:
    unavailable = unavailable if surge else max(1, unavailable)
    rolling = {"replicas": replicas, "surge": surge, "unavailable": unavailable}
    pods = running(**rolling)
    for what, number in steps:
        if what == "release":
            pods.deployment.apply(manifest("abc"[number - 1], **rolling))
        elif what == "serve":
            pods.serve(pods.deployment.release, number)
        else:
            pods.reconcile()
        assert len(pods.pods) <= replicas + surge
        assert sum(pod.available for pod in pods.pods) >= replicas - unavailable
    for _ in range(4 * replicas):
        pods.settle()
        pods.serve(pods.deployment.release)
    assert pods.deployment.complete(pods.pods)


@pytest.mark.parametrize("surge", [1, 2])
def test_it_ends_with_the_newest_release_however_many_come_at_a_time(surge: int) -> None:
    pods = running(replicas=4, surge=surge)
    pods.deployment.apply(manifest("b", replicas=4, surge=surge))
    for _ in range(20):
        pods.settle()
        pods.serve("b", 1)
    assert pods.deployment.complete(pods.pods)
