"""Services with the model "m", whose workers answer as a test says, for the handlers of protocols."""

from __future__ import annotations

from driver_scene import SPEC, Scene

from gpuserve.config.settings.server import ServerSettings
from gpuserve.front.net.async_requests import AsyncRequests
from gpuserve.front.service.inference_service import InferenceService, inference_service
from gpuserve.model.spec import ModelSpec

LIMIT_NBYTES = 1 << 20


class ServiceScene:
    """A service with the model "m", and the requests that coroutines serve."""

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        self.scene = Scene(spec, arena_nbytes=1 << 26)
        self.service: InferenceService = inference_service(ServerSettings(name="test"))
        self.service.models.add(self.scene.driver)
        self.requests = AsyncRequests()

    async def settle(self) -> None:
        """Run everything that is due."""
        await self.scene.settle()

    async def answer(self, well: bool = True) -> None:
        """Answer a batch of each worker that has one."""
        await self.settle()
        for worker in self.scene.workers:
            if worker.runs:
                worker.answer([well])
        await self.settle()

    async def __aenter__(self) -> ServiceScene:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.requests.stop()
        self.scene.close()
