"""Whether the trace settings that a server is started with can be: their values, and what they need."""

from __future__ import annotations

import importlib.util
from typing import Final

from gpuserve.errors import ConfigError
from gpuserve.settings import TraceSettings

LEVELS: Final = ("TIMESTAMPS", "TENSORS")
MODES: Final = ("triton", "opentelemetry")
NO_FILE: Final = "a trace level needs a file to write to in mode 'triton': give file, or mode 'opentelemetry'"
NOT_INSTALLED: Final = (
    "mode 'opentelemetry' needs the OpenTelemetry SDK and its OTLP exporter, which are not installed: "
    "pip install 'gpuserve[otel]'"
)
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def check_trace(settings: TraceSettings) -> None:
    """Do nothing where a server can be started with these.

    Raises:
        ConfigError: a value cannot be, or a package is missing.
    """
    if not isinstance(settings, TraceSettings):
        raise ConfigError(f"trace: expected a TraceSettings, given {type(settings).__name__}")
    level: object = settings.level
    if not isinstance(level, tuple | list) or any(one not in LEVELS for one in level):
        raise ConfigError(f"trace.level: expected any of {', '.join(LEVELS)}, given {settings.level!r}")
    if settings.mode not in MODES:
        raise ConfigError(f"trace.mode: expected one of {', '.join(MODES)}, given {settings.mode!r}")
    for name, least in (("rate", 1), ("count", -1), ("log_frequency", 0)):
        value = getattr(settings, name)
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"trace.{name}: expected an integer of at least {least}, given {value!r}")
    if is_without_file(settings.mode, settings.level, settings.file):
        raise ConfigError(f"trace: {NO_FILE}")
    problem = missing(settings.mode)
    if problem is not None:
        raise ConfigError(f"trace.mode: {problem}")


def is_without_file(mode: object, level: object, file: object) -> bool:
    """Whether something is to be traced, and there is nowhere to write it."""
    return mode == MODES[0] and bool(level) and not file


def missing(mode: str) -> str | None:
    """What a mode needs and this Python does not have; None where it has all."""
    if mode == MODES[0]:
        return None
    try:
        found = importlib.util.find_spec(_EXPORTER) is not None
        found = found and importlib.util.find_spec("opentelemetry.sdk.trace") is not None
    except ModuleNotFoundError:  # not even the package around it
        found = False
    return None if found else NOT_INSTALLED
