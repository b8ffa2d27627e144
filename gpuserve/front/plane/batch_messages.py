"""The batches of one model as messages: what its workers are sent, and what they answer. Where tensors are
put is decided in ``gather.py``, and which of them belong to whom in ``scatter.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gpuserve.front.endpoint.v2 import InferRequest
from gpuserve.front.links import WorkerLink
from gpuserve.front.plane.gather import Gathered, Gathering
from gpuserve.front.plane.run_message import run_message
from gpuserve.front.plane.scatter import Answer, scatter
from gpuserve.front.plane.sequence_rows import SequenceRows
from gpuserve.front.scheduler import refusals
from gpuserve.front.scheduler.slots import Batch
from gpuserve.spec import ModelSpec
from gpuserve_worker import wire
from gpuserve_worker.memory import Arena

logger = logging.getLogger(__name__)


class BatchMessages:
    """Of one model, whose inputs lie in ``arena``."""

    def __init__(self, spec: ModelSpec, arena: Arena) -> None:
        self._spec = spec
        self._gathering = Gathering(spec, arena)
        self._rows = SequenceRows(spec) if spec.in_sequences else None
        self.device_inputs = self._gathering.device_inputs
        self.is_repeatable = self._gathering.is_repeatable

    def pack(self, batch: Batch, link: WorkerLink) -> tuple[Gathered, wire.Run]:
        """A batch for a worker: its tensors, and the message that tells of them.

        Raises:
            OutOfMemory: the arena has no room.
        """
        members: Sequence[Any] = batch.requests if self._rows is None else self._rows.members(batch)
        requests: list[InferRequest] = [one.request for one in members]
        rows = [one.rows for one in members]
        nbytes = sum([one.nbytes for one in members])
        gathered = self._gathering.gather(requests, rows, nbytes, link)
        run = run_message(batch.batch_id, rows, requests, gathered)
        return gathered, run if self._rows is None else self._rows.told(run, batch, members)

    def unpack(
        self,
        link: WorkerLink,
        batch: Batch,
        message: wire.Done | wire.Yield,
        on_gone: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """What a worker answered, for each request of the batch."""
        try:
            if self._rows is not None:
                return self._rows.scatter(link, batch, message, on_gone)
            return scatter(self._spec, link, batch.requests, message, on_gone)
        except (ValueError, TypeError, KeyError) as error:
            # A worker is not trusted either: user code runs in it.
            logger.error("model %s: nonsense from instance %s: %s", self._spec.name, link.instance, error)
            wrong = refusals.nonsense(self._spec.name)
            return [wrong] * len(batch.requests)
