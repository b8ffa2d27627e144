"""Models that get more instances, or fewer, while they are served: what the supervisor says of that, obeyed.

Which instances a model has is the supervisor's to say; here is waited until one that leaves has finished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.generations import Generations
from gpuserve.front.links import WorkerLink
from gpuserve.front.model_calls import ModelCalls
from gpuserve.front.scheduler.driver import ModelDriver
from gpuserve.spec import ModelSpec
from gpuserve.supervisor import messages

#: How often it is looked whether an instance has finished what it has.
_POLL_S: Final = 0.005


class Resizing:
    """Of the models of one front; ``say`` tells the supervisor, and ``spawn`` starts a task."""

    def __init__(
        self,
        generations: Generations,
        calls: ModelCalls,
        service: InferenceService,
        say: Callable[[messages.InstanceRetired], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._generations = generations
        self._calls = calls
        self._service = service
        self._say = say
        self._spawn = spawn

    def obey(self, message: messages.Resize | messages.RetireInstance) -> None:
        """A generation has other instances from now on, or one of them is to finish what it has and go."""
        driver = self._generations.of_workers(message.generation)
        if isinstance(message, messages.RetireInstance):
            # Which link is meant is known now: what comes under that name later is another instance.
            link = None if driver is None else driver.instances.get(message.instance)
            self._spawn(self._retire(message, driver, link))
        elif driver is not None:
            driver.resize(ModelSpec.from_wire(message.spec))
            self._service.instance_changed(driver)

    async def _retire(
        self, message: messages.RetireInstance, driver: ModelDriver | None, link: WorkerLink | None
    ) -> None:
        generation, instance, timeout_s = message
        if driver is not None and instance in driver.instances:
            await self._let_go(driver, instance, link, time.monotonic() + timeout_s)
        self._say(messages.InstanceRetired(generation, instance))

    async def _let_go(
        self, driver: ModelDriver, instance: str, link: WorkerLink | None, deadline: float
    ) -> None:
        def is_up() -> bool:
            return link is not None and driver.instances.get(instance) is link

        # While all others wait for the model itself, or start again, it is needed.
        await _wait(lambda: not is_up() or self._calls.can_spare(driver, instance), deadline)
        if _is_another(driver, instance, link):
            return
        driver.retire_instance(instance)
        self._service.instance_changed(driver)
        await _wait(lambda: not is_up() or driver.is_idle(instance), deadline)
        if not _is_another(driver, instance, link):
            driver.let_go(instance)
            self._calls.refuse_stuck(driver)


def _is_another(driver: ModelDriver, instance: str, link: WorkerLink | None) -> bool:
    """Whether the one that was meant has died, and another is up in its place."""
    return driver.instances.get(instance) not in (link, None)


async def _wait(condition: Callable[[], bool], deadline: float) -> None:
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
