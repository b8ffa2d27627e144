"""The service of a door that is a process of its own. It is made of the parts that the front's is made of;
the drivers in its table have the front run their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.front.passage import messages
from gpuserve.front.passage.absence import FrontAbsence
from gpuserve.front.passage.passage import Passage
from gpuserve.front.remote.drivers import RemoteRequests, Unpinned
from gpuserve.front.remote.mirror import URGENT, Mirrored, MirroredTable
from gpuserve.front.service.inference_service import InferenceService, inference_service
from gpuserve_worker.memory.arena import ArenaStatistics

#: How often what a burst took of the arena is looked for.
SHRINK_PERIOD_S: Final = 5.0


class DoorService:
    """Inference in a door, until ``close``. ``obey`` says who takes which message of the front."""

    def __init__(self, settings: ServerSettings, passage: Passage) -> None:
        self.service: InferenceService = inference_service(settings, table=MirroredTable, pins=Unpinned())
        models, look_ahead = self.service.models, partial(passage.look_ahead, URGENT)
        assert isinstance(models, MirroredTable)
        models.look_ahead = look_ahead
        self.absence = FrontAbsence()
        self._requests = RemoteRequests(passage, settings.max_arena_nbytes, self.absence)
        self._mirrored = Mirrored(models, self.service.health, self._requests)
        self.obey: Mapping[type, Callable[[Any], None]] = {**self._requests.obey, **self._mirrored.obey}

    def attach(self, message: messages.LendSegment, fds: list[int]) -> None:
        """Map a segment that the front lends; its descriptor stays the caller's."""
        self._requests.memory.attach(message, fds)

    def shrink(self) -> None:
        """Called now and then: give back what a burst took of the arena."""
        self._requests.memory.arena.shrink()

    def arena_statistics(self) -> ArenaStatistics:
        return self._requests.memory.arena.statistics()

    def lose(self) -> None:
        """Be not ready, answer what the front had, and hold what comes: the front has died."""
        self.service.health.leave_service()
        self.absence.begin()
        self._requests.lose()

    def resume(self) -> None:
        """Go on with another front."""
        self._mirrored.begin()
        self._requests.memory.introduce()
        self.service.health.return_to_service()
        self.absence.end()

    def close(self) -> None:
        self._requests.close()
