"""What a server says of its health: one report, whichever protocol and port it is asked on. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol

#: Those that mean the server as a whole.
_WHOLE: Final = ("", "readiness", "inference.GRPCInferenceService")
_MODEL: Final = "model/"


class HealthReport(NamedTuple):
    """The health at one moment. ``live``: a restart would not help. ``ready``: requests should come here."""

    live: bool
    started: bool
    ready: bool
    models: Mapping[str, bool]

    def of(self, service: str) -> bool | None:
        """The answer of ``grpc.health.v1`` for a service name; None where there is no such service."""
        if service in _WHOLE:
            return self.ready
        match service:
            case "liveness":
                return self.live
            case "startup":
                return self.started
        return self.models.get(service.removeprefix(_MODEL)) if service.startswith(_MODEL) else None


class HealthSource(Protocol):
    """Whoever can be asked for the health, and told to say when it changes."""

    @property
    def ended(self) -> bool:
        """Whether nothing changes any more, so that who watches is to stop."""

    def of(self, service: str) -> bool | None:
        """The answer of ``grpc.health.v1`` for a service name; see ``HealthReport.of``."""

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after anything may have changed. Call the result to end it."""


class Watchers:
    """The callbacks of all who are to be told when anything changed that health may depend on."""

    def __init__(self) -> None:
        #: By a number each: every open stream has one, and a list would be searched for those that end.
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._callbacks)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after every change. Call the result to end it."""
        number = next(self._numbers)
        self._callbacks[number] = callback
        return partial(self._callbacks.__delitem__, number)

    def changed(self) -> None:
        for callback in list(self._callbacks.values()):
            callback()
