"""What clients and operators ask of the supervisor, and who waits for which answer; and the log settings.
Models are loaded, and operators' verbs are run, by the supervisor. What a verb means, and whether its
arguments can be, the supervisor says.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from gpuserve.config.settings import logs
from gpuserve.config.settings.logs import LOG, LogSettings
from gpuserve.core.errors import InvalidArgument, Unavailable, Unimplemented, request_error
from gpuserve.front.service.model_table import ModelTable
from gpuserve.front.v2.limits import shown
from gpuserve.supervisor.control import front_messages as messages
from gpuserve.supervisor.control.operator_protocol import VerbOutcome

logger = logging.getLogger(__name__)

#: Sends a message of ``control.messages`` to the supervisor.
Say: TypeAlias = Callable[[tuple[Any, ...]], None]

EXPLICIT: Final = "explicit"
_FILE: Final = "file:"


class Questions:
    """Questions to the supervisor, each under a ticket of its own until its answer comes."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[VerbOutcome]] = {}

    async def ask(self, question: Callable[..., tuple[Any, ...]], *arguments: Any) -> VerbOutcome:
        """Say ``question(ticket, *arguments)``, and return the answer; what was begun goes on unawaited."""
        ticket = next(self._tickets)
        self._waiting[ticket] = waiting = asyncio.get_running_loop().create_future()
        self._say(question(ticket, *arguments))
        try:
            outcome: VerbOutcome = await waiting
        finally:
            self._waiting.pop(ticket, None)
        return outcome

    def answered(self, ticket: int, outcome: VerbOutcome) -> None:
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)


class LogControl:
    """The log settings that hold in this process; the supervisor is told those that a client has changed."""

    def __init__(self, log_level: str, say: Say) -> None:
        self.settings = LogSettings.of_level(log_level)
        self._say = say
        self._followers: list[Callable[[LogSettings], None]] = []

    def follow(self, take: Callable[[LogSettings], None]) -> None:
        """Have another process told of the settings, now and when they are others."""
        self._followers.append(take)
        take(self.settings)

    def update(self, changes: Mapping[str, Any]) -> LogSettings:
        """Change some fields, to checked values, and return all."""
        if changes:
            self.restore(changes)
            self._say(messages.Changed(LOG, self.settings._asdict()))
        return self.settings

    def restore(self, wire: Mapping[str, Any]) -> None:
        """Take over what clients had changed at an earlier front."""
        self.settings = self.settings._replace(**wire)
        logs.adjust(self.settings)
        for take in self._followers:
            take(self.settings)


class AdminControl:
    """The verbs of operators who ask over HTTP; without ``is_open`` there is no admin API."""

    def __init__(self, questions: Questions, *, is_open: bool) -> None:
        self._questions = questions
        self.is_open = is_open

    async def ask(self, verb: str, arguments: dict[str, Any]) -> VerbOutcome:
        """Return once the supervisor has answered; Unimplemented: there is no admin API."""
        if not self.is_open:
            raise Unimplemented("this server has no admin API; the setting admin_api opens it")
        return await self._questions.ask(messages.Operate, verb, arguments)


class RepositoryControl:
    """Loading and unloading of ``models`` as clients ask for it; only where ``mode`` is "explicit"."""

    def __init__(self, mode: str, questions: Questions, models: ModelTable) -> None:
        self.mode = mode
        self._questions = questions
        self._models = models

    async def load(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Load a model, changed by the JSON text "config", until it is served; raises ``RequestError``."""
        self._check_allowed(model)
        changes = self._changes(model, parameters)
        await self._ask(messages.LoadModel, model, changes)

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload all versions of a model, until its workers have ended; raises ``RequestError``."""
        self._check_allowed(model)
        for key, value in parameters.items():
            if key != "unload_dependents":
                raise InvalidArgument(f"unrecognized unload parameter '{shown(key)}'.")
            if not isinstance(value, bool):
                raise InvalidArgument(
                    "invalid value type for 'unload_dependents' parameter, expected bool_param."
                )
        for one in self.unloaded_with(model, parameters):
            await self._ask(messages.UnloadModel, one)

    def unloaded_with(self, model: str, parameters: Mapping[str, Any]) -> list[str]:
        """The models that an unload with these parameters is of."""
        return [model, *(self._members(model) if parameters.get("unload_dependents") else ())]

    def _members(self, model: str) -> list[str]:
        """The models of an ensemble's steps, and those of steps that are ensembles."""
        found: dict[str, None] = {}
        left = [model]
        while left:
            steps = [step for spec in self._models.specs(left.pop()) for step in spec.steps]
            new = [step.model for step in steps if step.model not in found]
            found.update(dict.fromkeys(new))
            left += new
        return list(found)

    async def _ask(self, question: Callable[..., tuple[Any, ...]], *arguments: Any) -> None:
        outcome = await self._questions.ask(question, *arguments)
        if outcome.code:
            raise request_error(outcome.code, outcome.text)

    def _check_allowed(self, model: str) -> None:
        if self.mode != EXPLICIT:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        if not model:
            raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
        if "/" in model or "\\" in model or ".." in model:
            raise InvalidArgument(
                f"invalid model name '{shown(model)}', model name must not contain path traversal characters"
            )

    def _changes(self, model: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in parameters.items():
            _check_parameter(key, value)
        if any(key.startswith(_FILE) for key in parameters):
            logger.warning(
                "model %s: a load request brought files, which are not taken from clients", shown(model)
            )
            raise InvalidArgument(_cannot_poll(model))
        text = parameters.get("config")
        if text is None:
            return {}
        # protobuf's JSON is only imported by who uses it
        from gpuserve.front.v2.config_override import BadOverride, read_override

        try:
            return read_override(model, text, self._models.specs(model))
        except BadOverride as error:
            logger.error("Invalid config override: %s", error)
            raise InvalidArgument(f"{_cannot_poll(model)}: Invalid config override: {error}") from None


def _check_parameter(key: str, value: Any) -> None:
    if key == "config":
        if not isinstance(value, str):
            raise InvalidArgument("invalid value type for load parameter 'config', expected string_param.")
    elif key.startswith(_FILE):
        if not isinstance(value, bytes):
            raise InvalidArgument(
                f"invalid value type for load parameter '{shown(key)}', expected bytes_param."
            )
    else:
        raise InvalidArgument(f"unrecognized load parameter '{shown(key)}'.")


def _cannot_poll(model: str) -> str:
    return f"failed to load '{shown(model)}', failed to poll from model repository"
