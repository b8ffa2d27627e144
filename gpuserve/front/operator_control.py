"""The operator's word as it reaches a front: out of service and back again, and the question how it is."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gpuserve.front.census import census
from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.generations import Generations
from gpuserve.front.quiescing import Quiescing
from gpuserve.front.transport import Transport
from gpuserve.supervisor import messages


class OperatorControl:
    """What the supervisor asks of a front for an operator; ``say`` answers it, ``spawn`` starts a task."""

    def __init__(
        self,
        service: InferenceService,
        generations: Generations,
        transports: Sequence[Transport],
        say: Callable[[Any], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._service = service
        self._generations = generations
        self._quiescing = Quiescing(service, transports, generations.unfinished, generations.accepted)
        self._say = say
        self._spawn = spawn

    def obey(self, message: messages.Quiesce | messages.Resume | messages.TakeCensus) -> None:
        """Do it, or begin to."""
        match message:
            case messages.Quiesce(ticket, timeout_s, lame_duck_s):
                self._quiescing.leave()  # before what comes next is obeyed: never ready in between
                self._spawn(self._quiesce(ticket, timeout_s, lame_duck_s))
            case messages.Resume():
                self._quiescing.resume()
            case messages.TakeCensus(ticket):
                self._say(census(ticket, self._service, self._generations))

    async def _quiesce(self, ticket: int, timeout_s: float, lame_duck_s: float) -> None:
        end = await self._quiescing.run(lame_duck_s, timeout_s)
        if end is not None:
            self._say(messages.Quiesced(ticket, *end))
