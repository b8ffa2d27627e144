"""The verb ``status``: asks the front for what only it knows, and puts the answer together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuserve import __version__
from gpuserve.settings import ServerSettings
from gpuserve.supervisor.attached_models import AttachedModels
from gpuserve.supervisor.front_keeper import FrontKeeper
from gpuserve.supervisor.listeners import Listeners
from gpuserve.supervisor.messages import Census
from gpuserve.supervisor.operator.front_census import FrontCensus
from gpuserve.supervisor.operator.outcome import AnswerOutcome, Outcome
from gpuserve.supervisor.operator.quiescence import Quiescence
from gpuserve.supervisor.operator.server_status import Knowledge, model_rows
from gpuserve.supervisor.served_models import ServedModels
from gpuserve.supervisor.server_state import ServerLife


class OperatorStatus:
    """Of one server. ``config`` is the path of its config file, "" where it has none; ``settings`` gives its
    settings as they are.
    """

    def __init__(
        self,
        life: ServerLife,
        settings: Callable[[], ServerSettings],
        listeners: Listeners,
        front: FrontKeeper,
        census: FrontCensus,
        models: ServedModels,
        attached: AttachedModels,
        quiescence: Quiescence,
        config: str,
    ) -> None:
        self._life = life
        self._settings = settings
        self._listeners = listeners
        self._front = front
        self._census = census
        self._models = models
        self._attached = attached
        self._quiescence = quiescence
        self._config = str(Path(config).absolute()) if config else ""  # a client may be anywhere
        self._made_at = time.monotonic()

    def ask(self, answer: AnswerOutcome) -> None:
        """Answered at once, or as soon as the front has answered."""
        self._census.ask(lambda census: answer(Outcome("", "", self._document(census))))

    def _document(self, census: Census | None) -> dict[str, Any]:
        known = Knowledge(
            "config" if self._config else f"program {os.getpid()}",
            self._models.names(),
            self._models.specs(),
            self._models.workers(),
            tuple(self._attached.served()),
            census,
            self._models.leaving(),
        )
        return {"server": self._server(census), "models": model_rows(known)}

    def _server(self, census: Census | None) -> dict[str, Any]:
        settings, process = self._settings(), self._front.process
        return {
            "name": settings.name,
            "version": __version__,
            "pid": os.getpid(),
            "state": self._life.state.value,
            "service": self._quiescence.state.value,
            "ready": census is not None and census.ready,
            "uptime_s": round(time.monotonic() - self._made_at, 3),
            "addresses": self._listeners.addresses(settings),
            "front": {
                "pid": None if process is None else process.pid,
                "restarts": self._front.restarts,
                "answers": census is not None,
            },
            "config": self._config,
        }
