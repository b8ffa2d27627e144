"""What an inference callable has done with models of its server: it loads and unloads them as clients do,
under the same rules, and asks whether they are ready.
"""

from __future__ import annotations

import logging
from typing import Any

from gpuserve.core.errors import RequestError
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.process.ports import Spawn
from gpuserve.front.service.service import InferenceService
from gpuserve_worker.calling.questions import LOAD, READY, UNLOAD
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)


class ModelCommands:
    """Obeys the commands of all workers of one front."""

    def __init__(self, service: InferenceService, spawn: Spawn) -> None:
        self._service = service
        self._spawn = spawn

    def take(self, link: WorkerLink, own_model: str, command: wire.Command) -> None:
        """Do what a worker of ``own_model`` says, and answer; ``WireError``: there is no such command."""
        call_id, verb, model, parameters = command
        if not isinstance(model, str) or not isinstance(parameters, dict):
            raise wire.WireError(f"a command about {model!r} with {parameters!r}")
        if verb == READY:
            self._tell_ready(link, call_id, model, str(parameters.get("version", "")))
        elif verb == LOAD:
            self._spawn(self._load(link, call_id, model, parameters))
        elif verb == UNLOAD:
            # One that waits for its own end would never come to it.
            waits = own_model not in self._service.control.repository.unloaded_with(model, parameters)
            if not waits:
                end_call(link, call_id)
            self._spawn(self._unload(link, call_id if waits else None, model, parameters))
        else:
            raise wire.WireError(f"no worker may command {verb!r}")

    def _tell_ready(self, link: WorkerLink, call_id: int, model: str, version: str) -> None:
        try:
            ready = self._service.health.model_ready(model, version)
        except RequestError as error:
            end_call(link, call_id, error)
        else:
            link.send(wire.Answer(call_id, 0, None, {READY: ready}, None, True))

    async def _load(self, link: WorkerLink, call_id: int, model: str, parameters: dict[str, Any]) -> None:
        try:
            await self._service.control.repository.load(model, parameters)
        except RequestError as error:
            end_call(link, call_id, error)
        else:
            end_call(link, call_id)

    async def _unload(
        self, link: WorkerLink, call_id: int | None, model: str, parameters: dict[str, Any]
    ) -> None:
        failure: RequestError | None = None
        try:
            await self._service.control.repository.unload(model, parameters)
        except RequestError as error:
            failure = error
        if call_id is not None:
            end_call(link, call_id, failure)
        elif failure is not None:
            logger.warning("model %s: it asked to be unloaded, and is not: %s", model, failure)


def end_call(link: WorkerLink, call_id: int, error: RequestError | None = None) -> None:
    """Tell a worker that no answer to what it asked will come but this, which is none or a failure."""
    failure = None if error is None else wire.WireFailure(error.code.value, str(error))
    link.send(wire.Answer(call_id, 0, None, {}, failure, True))
