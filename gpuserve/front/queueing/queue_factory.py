"""Which queue a model has. Pure."""

from __future__ import annotations

from gpuserve.front.queueing.fair_queue import FairQueue
from gpuserve.front.queueing.priority_queue import PriorityQueue
from gpuserve.front.queueing.queue import RequestQueue
from gpuserve.model.spec import CLIENT, PolicySpec, QueueSpec


def request_queue(spec: QueueSpec) -> RequestQueue:
    """The queue of a model: with lanes only where something tells its requests apart."""
    if spec.fairness == CLIENT:
        return FairQueue(spec)
    if spec.priority_levels == 0 and spec.policy == PolicySpec():
        return RequestQueue(spec)
    return PriorityQueue(spec)
