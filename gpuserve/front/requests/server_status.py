"""The health report of a server for all protocols, and HTTP and gRPC statuses of errors. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol

from gpuserve.core.errors import Code

#: Service names that mean the server as a whole.
_WHOLE: Final = ("", "readiness", "inference.GRPCInferenceService")
_MODEL: Final = "model/"


class HealthReport(NamedTuple):
    """The health at one moment. ``live``: a restart would not help. ``ready``: requests should come here."""

    live: bool
    started: bool
    ready: bool
    models: Mapping[str, bool]

    def of(self, service: str) -> bool | None:
        """Return the ``grpc.health.v1`` answer for a service name, or None for an unknown service."""
        if service in _WHOLE:
            return self.ready
        match service:
            case "liveness":
                return self.live
            case "startup":
                return self.started
        return self.models.get(service.removeprefix(_MODEL)) if service.startswith(_MODEL) else None


class HealthSource(Protocol):
    """A source of health reports that notifies subscribers of changes."""

    @property
    def ended(self) -> bool:
        """Return whether no more changes follow, so that subscribers should stop."""

    def of(self, service: str) -> bool | None:
        """Return the ``grpc.health.v1`` answer for a service name; see ``HealthReport.of``."""

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` after every possible change. Returns a function that ends the subscription."""


class HealthSubscribers:
    """Subscribers to changes that the health may depend on."""

    def __init__(self) -> None:
        #: Callbacks by number: every open stream has one, and a list would be searched for each that ends.
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._callbacks)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` after every change. Returns a function that ends the subscription."""
        number = next(self._numbers)
        self._callbacks[number] = callback
        return partial(self._callbacks.__delitem__, number)

    def changed(self) -> None:
        for callback in list(self._callbacks.values()):
            callback()


# ---- errors --------------------------------------------------------------------------------------

STATUS: Final[dict[Code, tuple[int, int]]] = {
    Code.INVALID_ARGUMENT: (400, 3),
    Code.NOT_FOUND: (404, 5),
    Code.ALREADY_EXISTS: (400, 6),
    Code.PERMISSION_DENIED: (403, 7),
    Code.UNAVAILABLE: (503, 14),
    Code.RESOURCE_EXHAUSTED: (413, 8),
    Code.NO_MEMORY: (503, 8),
    Code.RATE_LIMITED: (429, 8),
    Code.DEADLINE_EXCEEDED: (504, 4),
    Code.CANCELLED: (499, 1),
    Code.UNIMPLEMENTED: (501, 12),
    Code.UNKNOWN: (400, 2),
    Code.INTERNAL: (500, 13),
}
