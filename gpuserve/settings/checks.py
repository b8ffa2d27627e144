"""Whether a server can be started with settings that a program gives: each by itself, and all together. A
config file is checked by the rows of the same tables, and told what does not go together at its place
(``gpuserve/config/rules.py``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from typing import Final

from gpuserve.errors import ConfigError
from gpuserve.options import declared
from gpuserve.settings.access import NO_TOKEN
from gpuserve.settings.doors import doors_problem
from gpuserve.settings.server import EXPLICIT, POLL, TRITON, ServerSettings, TraceSettings
from gpuserve.settings.tls import check_tls, with_whole_paths

NO_FILE: Final = "a trace level needs a file to write to in mode 'triton': give file, or mode 'opentelemetry'"
NOT_INSTALLED: Final = (
    "mode 'opentelemetry' needs the OpenTelemetry SDK and its OTLP exporter, which are not installed: "
    "pip install 'gpuserve[otel]'"
)
METRICS_NOT_INSTALLED: Final = (
    "sending metrics needs the OpenTelemetry SDK and its OTLP exporter, which are not installed: "
    "pip install 'gpuserve[otel]'"
)
_TRACES: Final = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace")
_METRICS: Final = ("opentelemetry.exporter.otlp.proto.http.metric_exporter", "opentelemetry.sdk.metrics")


def checked_settings(settings: ServerSettings) -> ServerSettings:
    """The settings with lists as tuples and whole paths. No token is in any text. Raises ConfigError: a value
    cannot be, some do not go together, or a file of TLS cannot be used.
    """
    try:
        made = declared(ServerSettings, settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if made.restricted_endpoints and made.access_token is None:
        raise ConfigError(NO_TOKEN)
    if made.model_control == POLL:
        raise ConfigError("model_control='poll' follows the files of a server's models; a program has none")
    if made.model_control != EXPLICIT and made.load_at_start is not None:
        raise ConfigError("load_at_start needs model_control='explicit'; without it every model is loaded")
    if problem := doors_problem(made.doors, made.transport):
        raise ConfigError(problem)
    made = with_whole_paths(made, lambda _: os.getcwd())
    check_tls(made)
    check_trace(made.trace)
    if problem := missing_for_metrics(made.metrics_otlp_url):
        raise ConfigError(f"metrics_otlp_url: {problem}")
    return made


def check_trace(settings: TraceSettings) -> None:
    """Raise ConfigError unless a server can be started with these: a value cannot be, or a package is
    missing.
    """
    try:
        if not isinstance(settings, TraceSettings):
            raise ValueError(
                f"trace must be a TraceSettings, got an object of type {type(settings).__name__}"
            )
        settings = declared(TraceSettings, settings, "trace.")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if is_without_file(settings.mode, settings.level, settings.file):
        raise ConfigError(f"trace: {NO_FILE}")
    problem = missing(settings.mode)
    if problem is not None:
        raise ConfigError(f"trace.mode: {problem}")


def is_without_file(mode: object, level: object, file: object) -> bool:
    """Whether something is to be traced, and there is nowhere to write it."""
    return mode == TRITON and bool(level) and not file


def missing(mode: str) -> str | None:
    """What a mode needs and this Python does not have; None where it has all."""
    return None if mode == TRITON or _are_there(_TRACES) else NOT_INSTALLED


def missing_for_metrics(url: str | None) -> str | None:
    """What sending metrics needs and this Python does not have; None where it has all, or none are sent."""
    return None if url is None or _are_there(_METRICS) else METRICS_NOT_INSTALLED


def _are_there(modules: Iterable[str]) -> bool:
    try:
        return all(importlib.util.find_spec(one) is not None for one in modules)
    except ModuleNotFoundError:  # not even the package around it
        return False
