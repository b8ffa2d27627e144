"""Loading and unloading of models as clients ask for it: what they may ask, and who is to answer them.

The loading is the supervisor's; it is asked by a ticket, and answers some time later.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gpuserve.errors import Internal, InvalidArgument, Unavailable, request_error
from gpuserve.front.endpoint.limits import shown
from gpuserve.spec import ModelSpec

logger = logging.getLogger(__name__)

EXPLICIT: Final = "explicit"
NOT_ALLOWED: Final = "explicit model load / unload is not allowed if polling is enabled"
_FILE: Final = "file:"


class RepositoryControl:
    """What clients ask for; with any ``mode`` but "explicit" nothing.

    ``ask_load(ticket, model, changes)`` and ``ask_unload(ticket, model)`` send it on; ``answered`` is to be
    called with what comes back. ``served`` gives the declarations of a model's versions that are served.
    """

    def __init__(
        self,
        mode: str = "none",
        ask_load: Callable[[int, str, dict[str, Any]], None] = lambda *_: None,
        ask_unload: Callable[[int, str], None] = lambda *_: None,
        served: Callable[[str], Sequence[ModelSpec]] = lambda _: (),
    ) -> None:
        self.mode = mode
        self._ask_load = ask_load
        self._ask_unload = ask_unload
        self._served = served
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def load(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Load a model, or load it anew; returns once its new workers serve it.

        ``parameters``: "config", a JSON text that changes its declaration. Nothing else is taken.

        Raises:
            RequestError: it is not allowed, the parameters are wrong, or the model could not be loaded.
        """
        self._check_allowed(model)
        changes = self._changes(model, parameters)
        await self._ask(lambda ticket: self._ask_load(ticket, model, changes))

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload every version of a model; returns once its workers have ended. Unknown models are ignored.

        Raises:
            RequestError: it is not allowed, or a parameter is wrong.
        """
        self._check_allowed(model)
        for key, value in parameters.items():
            if key != "unload_dependents":
                raise InvalidArgument(f"unrecognized unload parameter '{shown(key)}'.")
            if not isinstance(value, bool):
                raise InvalidArgument(
                    "invalid value type for 'unload_dependents' parameter, expected bool_param."
                )
        models = [model, *(self._members(model) if parameters.get("unload_dependents") else ())]
        for one in models:
            await self._unload(one)

    async def _unload(self, model: str) -> None:
        await self._ask(lambda ticket: self._ask_unload(ticket, model))

    def _members(self, model: str) -> list[str]:
        """The models of an ensemble's steps, and theirs."""
        found: dict[str, None] = {}
        left = [model]
        while left:
            steps = [step for spec in self._served(left.pop()) for step in spec.steps]
            new = [step.model for step in steps if step.model not in found]
            found.update(dict.fromkeys(new))
            left += new
        return list(found)

    def answered(self, ticket: int, code: str, text: str) -> None:
        """The supervisor's answer: a code and a text, empty where it went well."""
        waiting = self._waiting.pop(ticket, None)
        if waiting is None or waiting.done():
            return
        if code:
            waiting.set_exception(request_error(code, text))
        else:
            waiting.set_result(None)

    async def _ask(self, ask: Callable[[int], None]) -> None:
        ticket = next(self._tickets)
        self._waiting[ticket] = waiting = asyncio.get_running_loop().create_future()
        ask(ticket)
        try:
            await waiting
        finally:
            self._waiting.pop(ticket, None)

    def _check_allowed(self, model: str) -> None:
        if self.mode != EXPLICIT:
            raise Unavailable(NOT_ALLOWED)
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
            raise Internal(_cannot_poll(model))
        text = parameters.get("config")
        if text is None:
            return {}
        # protobuf's JSON is only imported by who uses it
        from gpuserve.front.endpoint.config_override import BadOverride, read_override

        try:
            return read_override(model, text, self._served(model))
        except BadOverride as error:
            logger.error("Invalid config override: %s", error)
            raise Internal(f"{_cannot_poll(model)}: Invalid config override: {error}") from None


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
