"""The ways of a front out of service, with real parts and nobody who asks anything."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gpuserve.config.settings.server import ServerSettings
from gpuserve.front.ipc.worker_link import DeviceLinks
from gpuserve.front.models.response_cache import ResponseCache
from gpuserve.front.net.server import ProtocolServer
from gpuserve.front.process.front import Draining
from gpuserve.front.process.generations import Generations, ModelParts
from gpuserve.front.process.listeners import FrontListeners
from gpuserve.front.service.inference_service import InferenceService, inference_service
from gpuserve.supervisor.control import front_messages as messages


class Told(ProtocolServer):
    """Counts the notices, and has a client that hears of none."""

    n_told = 0
    n_unaware = 1

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def announce(self) -> None:
        self.n_told += 1


class Scene:
    """A front without models and ports, which serves. ``said`` is what the supervisor is told."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.tasks: list[asyncio.Task[None]] = []
        settings = ServerSettings()
        self.service: InferenceService = inference_service(settings)
        parts = ModelParts(self.service, settings, 1, DeviceLinks(), ResponseCache(0))
        generations = Generations(parts, self.said.append, self.spawn)
        ports = FrontListeners(self.service, settings, self.spawn)
        self.draining = Draining(self.service.health, ports, generations, self.said.append, self.spawn)
        self.transport = Told()
        ports._transports.append(self.transport)
        self.service.health.serving()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))

    async def finish(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks), 10.0)


async def test_a_front_that_is_resumed_at_once_stays_in_service() -> None:
    scene = Scene()
    scene.draining.quiesce(messages.Quiesce(7, 5.0, 0.0))
    assert not scene.service.health.ready
    scene.draining.resume(messages.Resume())  # before anything else of it has run
    await scene.finish()
    assert scene.service.health.ready
    assert scene.said == []


async def test_a_quiet_front_says_so_and_is_resumed_later() -> None:
    scene = Scene()
    scene.draining.quiesce(messages.Quiesce(7, 5.0, 0.0))
    await scene.finish()
    assert scene.said == [messages.Quiesced(7, 0, True)]
    assert not scene.service.health.ready
    scene.draining.resume(messages.Resume())
    assert scene.service.health.ready


async def test_a_drain_is_for_good() -> None:
    scene = Scene()
    scene.draining.drain(messages.Drain(5.0))
    await scene.finish()
    assert scene.said == [messages.Drained(0)]
    assert scene.service.health.draining
    scene.draining.resume(messages.Resume())
    assert not scene.service.health.ready


async def test_clients_are_not_told_again_and_again() -> None:
    """A client that connects anew after the notice would be sent away each time that it is given."""
    scene = Scene()
    scene.draining.quiesce(messages.Quiesce(7, 5.0, 0.0))
    await scene.finish()
    assert scene.transport.n_told == 1
    scene.draining.drain(messages.Drain(5.0, notice=True))
    await scene.finish()
    assert scene.transport.n_told == 3  # the second time it is for those who have come since
