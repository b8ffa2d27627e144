"""Settings that change while a front serves: each told to all that goes by it. Which of them may change is in
``gpuserve/live_settings.py``; those that are not here are the supervisor's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from gpuserve.front.endpoint.service import InferenceService
from gpuserve.front.generations import Generations
from gpuserve.front.quantiles import LatencyWindow
from gpuserve.front.transport import Transport
from gpuserve.settings import ServerSettings


class Parts(NamedTuple):
    """What of a front goes by settings."""

    service: InferenceService
    generations: Generations
    transports: Iterable[Transport]


def adjusted(settings: ServerSettings, changes: Mapping[str, Any]) -> ServerSettings:
    """The settings with others among them, which are plain data (``messages.Adjust``)."""
    return ServerSettings.from_wire({**settings.to_wire(), **changes})


def apply(settings: ServerSettings, names: Iterable[str], parts: Parts) -> None:
    """Make these of the settings hold from now on."""
    for name in names:
        if name in _APPLIED:
            _APPLIED[name](settings, parts)


def _ages(settings: ServerSettings, parts: Parts) -> None:
    for transport in parts.transports:
        transport.limit_age(settings.max_connection_age_s)


def _readiness(settings: ServerSettings, parts: Parts) -> None:
    parts.service.min_healthy_devices = settings.min_healthy_devices
    parts.service.min_ready_instances = settings.min_ready_instances
    parts.service.changed()


def _summaries(settings: ServerSettings, parts: Parts) -> None:
    for driver in parts.generations.all():
        driver.metrics.window = LatencyWindow() if settings.metrics_summaries else None


def _model_control(settings: ServerSettings, parts: Parts) -> None:
    parts.service.repository.mode = settings.model_control


def _owners(settings: ServerSettings, parts: Parts) -> None:
    parts.service.regions.allow(settings.shared_memory_owners)


def _trace(settings: ServerSettings, parts: Parts) -> None:
    parts.service.trace.restart(settings.trace)


_APPLIED: Final[dict[str, Callable[[ServerSettings, Parts], None]]] = {
    "max_connection_age_s": _ages,
    "metrics_summaries": _summaries,
    "min_healthy_devices": _readiness,
    "min_ready_instances": _readiness,
    "model_control": _model_control,
    "shared_memory_owners": _owners,
    "trace": _trace,
}
