"""Pods for the tests of the stand-in kubelet, and their short life without processes. No test is here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.rollout.manifest import Container, Manifest, PodTemplate, Strategy
from benchmarks.rollout.pod import Pod, ProbeKind
from benchmarks.rollout.probes import Probe, TcpAction

PERIOD_S = 2.0
GRACE_S = 60.0
PRE_STOP_S = 10.0


def probe(failures: int, *, period_s: float = PERIOD_S, grace_s: float | None = None) -> Probe:
    return Probe(TcpAction(80), 0.0, period_s, 1.0, failures, 1, grace_s)


CONTAINER = Container(
    command=("serve",),
    environment={},
    working_folder="/tmp",
    ports={"http": 80, "grpc": 81},
    files={},
    empty_folders=(),
    startup=probe(30),
    readiness=probe(2),
    liveness=probe(3, grace_s=10.0),
    pre_stop_s=PRE_STOP_S,
)


def template(release: str = "a", **changes: Any) -> PodTemplate:
    return PodTemplate(release, replace(CONTAINER, **changes), GRACE_S)


def manifest(release: str = "a", *, replicas: int = 3, surge: int = 1, unavailable: int = 0) -> Manifest:
    return Manifest(replicas, Strategy(surge, unavailable), 10.0, template(release), 1)


def started(now: float = 0.0, **changes: Any) -> Pod:
    """A pod that runs and is ready."""
    pod = Pod("p", template(**changes), now)
    pod.orders(now)
    answer(pod, ProbeKind.STARTUP, True, now)
    answer(pod, ProbeKind.READINESS, True, now)
    return pod


def answer(pod: Pod, kind: ProbeKind, good: bool, now: float) -> None:
    """Ask what is due, and answer one of the questions; the others stay open."""
    assert kind in pod.questions(now)
    pod.answered(kind, pod.n_starts, good, now)
