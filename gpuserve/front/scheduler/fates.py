"""What a pending request is told that its scheduler took out of the queue or lost, by what its model is."""

from __future__ import annotations

from collections.abc import Callable

from gpuserve.errors import RequestError
from gpuserve.front.scheduler import refusals
from gpuserve.front.scheduler.queue import Fate, QueuedRequest
from gpuserve.front.statistics import FailureReason
from gpuserve.spec import ModelSpec


def taken_out(spec: ModelSpec, pending: QueuedRequest) -> RequestError:
    """``Scheduler.expire`` gave it."""
    if pending.correlation is not None and spec.in_sequences:
        return refusals.taken_out(spec.name, pending.correlation.id, pending.fate)
    assert pending.timeout_at is not None
    return refusals.waited_too_long(spec.name, pending.timeout_at - pending.enqueued_at)


def reason_taken_out(spec: ModelSpec, pending: QueuedRequest) -> FailureReason:
    """What such a request is counted under."""
    if pending.correlation is not None and spec.in_sequences and pending.fate is Fate.CANCELLED:
        return FailureReason.CANCELED
    return FailureReason.REJECTED


def lost(spec: ModelSpec, pending: QueuedRequest, ended: Callable[[], RequestError] | None) -> RequestError:
    """``Scheduler.instance_down`` gave it; ``ended`` says why no instance runs it, where no worker died."""
    if ended is not None:
        return ended()
    if pending.correlation is not None and spec.in_sequences:
        return refusals.sequence_lost(spec.name, pending.correlation.id)
    return refusals.worker_died(spec.name, pending.attempts)
