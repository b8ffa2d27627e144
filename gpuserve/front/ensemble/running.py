"""The requests of an ensemble under way, counted as a model's scheduler counts its own."""

from __future__ import annotations

from gpuserve.front.ensemble.run import EnsembleRun
from gpuserve.front.scheduler.interface import SchedulerStatistics
from gpuserve.front.scheduler.pending import PendingRequest

_NONE = SchedulerStatistics(*[0] * len(SchedulerStatistics._fields))


class Running:
    """``draining``: new ones are refused. None of them waits: their steps do, at their models."""

    def __init__(self) -> None:
        self.draining = False
        self.runs: dict[PendingRequest, EnsembleRun] = {}

    def statistics(self) -> SchedulerStatistics:
        """The counts at this moment."""
        return _NONE._replace(running_requests=len(self.runs))
