"""Probes as a kubelet runs them: when one is due, and what its results come to. Without clock or sockets.

How a probe is asked is in ``probing.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrpcAction:
    """``grpc.health.v1``: SERVING is good."""

    port: int
    service: str


@dataclass(frozen=True, slots=True)
class HttpAction:
    """A GET whose status must be 200 to 399."""

    port: int
    path: str


@dataclass(frozen=True, slots=True)
class TcpAction:
    """A port that takes a connection is good."""

    port: int


@dataclass(frozen=True, slots=True)
class ExecAction:
    """A command in the container; 0 is good."""

    command: tuple[str, ...]


Action = GrpcAction | HttpAction | TcpAction | ExecAction


@dataclass(frozen=True, slots=True)
class Probe:
    """One of the three of a container. ``grace_s``: of the end that its failure brings; None: the pod's."""

    action: Action
    initial_delay_s: float
    period_s: float
    timeout_s: float
    failure_threshold: int
    success_threshold: int
    grace_s: float | None = None


class ProbeRun:
    """A probe of one start of a container. ``passing``: what its results come to so far.

    A container is taken to be alive, and not to be ready, until so many results in a row say otherwise.
    """

    def __init__(self, probe: Probe, now: float, *, passing: bool) -> None:
        self.probe = probe
        self.passing = passing
        #: Whether one of the thresholds was ever reached.
        self.decided = False
        #: When it is asked next; infinite while it is asked.
        self.due = now + probe.initial_delay_s
        self._began = now
        self._row = 0
        self._last: bool | None = None

    def asked(self) -> None:
        """The question is under way; the next one waits for its answer."""
        self._began = self.due
        self.due = math.inf

    def answered(self, good: bool, now: float) -> None:
        """Count a result. The period goes from question to question, however late the answer is."""
        periods = max(1, math.ceil((now - self._began) / self.probe.period_s))
        self.due = self._began + periods * self.probe.period_s
        self._row = self._row + 1 if good is self._last else 1
        self._last = good
        if self._row >= (self.probe.success_threshold if good else self.probe.failure_threshold):
            self.passing = good
            self.decided = True
