"""Checks of the settings that a program gives, and of those that a running server is given. A setting may
change while a server runs if its row has ``live``. The supervisor (``supervisor/reload/config_reload.py``)
and the front (``front/process/front.py``) apply the change.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gpuserve.config.settings.server import (
    EXECUTION_COUNT,
    EXPLICIT,
    NATIVE,
    NATIVE_ALONE,
    POLL,
    TRITON,
    ResourceLimit,
    ServerSettings,
    TraceSettings,
)
from gpuserve.config.settings.tls import FILE_KEYS, check_tls, tls_pairing_problem, with_absolute_paths
from gpuserve.config.settings.values import NO_TOKEN, ingress_processes_problem, mask_userinfo
from gpuserve.core.errors import ConfigError, StartupError
from gpuserve.devices.names import CPU
from gpuserve.model.options import declared, rows
from gpuserve.model.rules import mapping
from gpuserve.model.spec import DeviceResource, ModelSpec

NO_FILE: Final = "a trace level needs a file to write to in mode 'triton': give file, or mode 'opentelemetry'"
NOT_INSTALLED: Final = (
    "mode 'opentelemetry' needs the OpenTelemetry SDK and its OTLP exporter, which are not installed: pip "
    "install 'gpuserve[otel]'"
)
_TRACES: Final = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace")


def checked_settings(settings: ServerSettings) -> ServerSettings:
    """Return valid settings, with tuples and absolute paths; raise ConfigError, without any token."""
    try:
        made = declared(ServerSettings, settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for key, text in server_faults(made.to_wire()):
        raise ConfigError(f"trace: {text}" if key == "trace" else text)
    if made.model_control == POLL:
        raise ConfigError("model_control='poll' follows the files of a server's models; a program has none")
    if made.model_control != EXPLICIT and made.load_at_start is not None:
        raise ConfigError("load_at_start needs model_control='explicit'; without it every model is loaded")
    made = with_absolute_paths(made, lambda _: os.getcwd())
    check_tls(made)
    check_trace(made.trace)
    return made


def server_faults(server: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and a sentence of each broken rule between settings, which are plain data."""
    if server.get("restricted_endpoints") and server.get("access_token") is None:
        yield "restricted_endpoints", NO_TOKEN
    if pairing := tls_pairing_problem(*(server.get(key) for key in FILE_KEYS)):
        yield pairing
    if problem := ingress_processes_problem(server.get("ingress_processes"), server.get("transport")):
        yield "ingress_processes", problem
    trace, defaults = mapping(server.get("trace")), TraceSettings()
    if lacks_trace_file(*(trace.get(key, getattr(defaults, key)) for key in ("mode", "level", "file"))):
        yield "trace", NO_FILE


def check_trace(settings: TraceSettings) -> None:
    """Raise ConfigError if a trace setting is invalid, or needs a package that is missing."""
    if not isinstance(settings, TraceSettings):
        raise ConfigError(f"trace must be a TraceSettings, got an object of type {type(settings).__name__}")
    try:
        settings = declared(TraceSettings, settings, "trace.")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if lacks_trace_file(settings.mode, settings.level, settings.file):
        raise ConfigError(f"trace: {NO_FILE}")
    problem = missing(settings.mode)
    if problem is not None:
        raise ConfigError(f"trace.mode: {problem}")


def lacks_trace_file(mode: object, level: object, file: object) -> bool:
    """Return whether requests are traced in mode triton without a file to write to."""
    return mode == TRITON and bool(level) and not file


def missing(mode: str) -> str | None:
    """Return which packages a trace mode needs that this Python lacks, as a sentence, or None."""
    try:
        if mode == TRITON or all(importlib.util.find_spec(one) for one in _TRACES):
            return None
    except ModuleNotFoundError:  # the parent package is missing
        pass
    return NOT_INSTALLED


class SettingRefusal(NamedTuple):
    """A setting that keeps its value while the server runs, with the reason."""

    key: str
    text: str


class SettingsChange(NamedTuple):
    """The settings from now on, the names of the new ones, and the changes that were refused."""

    settings: ServerSettings
    changed: tuple[str, ...]
    refused: tuple[SettingRefusal, ...]


def key_of(name: str) -> str:
    """Return the key of a setting in a config file, such as ``server.http_port``."""
    return f"server.{name}"


def compare_settings(before: ServerSettings, given: ServerSettings) -> SettingsChange:
    """Return which settings of a running server change, and which changes are refused."""
    changed: dict[str, Any] = {}
    refused: list[SettingRefusal] = []
    for name, row in rows(ServerSettings).items():
        old, new, live = getattr(before, name), getattr(given, name), row.option.live
        if old == new:
            continue
        if live and (before.transport == NATIVE or not live.endswith(NATIVE_ALONE)):
            changed[name] = new
        else:
            text = f"{key_of(name)}: cannot change while the server runs"
            if live:  # only the transport prevents the change
                text += f" with transport {before.transport}"
            if not row.option.secret:
                text += f": {shown(old)} stays, the file says {shown(new)}"
            refused.append(SettingRefusal(key_of(name), text))
    return SettingsChange(dataclasses.replace(before, **changed), tuple(changed), tuple(refused))


def describe_change(name: str, before: ServerSettings, now: ServerSettings) -> str:
    """Return a sentence about the new value and the old value of a setting."""
    if name == "trace":  # too long for a line
        return f"{key_of(name)} is as the file says now"
    return f"{key_of(name)} is {shown(getattr(now, name))} now, it was {shown(getattr(before, name))}"


def shown(value: Any) -> str:
    return mask_userinfo(json.dumps(value, default=repr))


def limit_of(resource: DeviceResource, limits: Iterable[ResourceLimit]) -> int | None:
    """Return the operator's limit of a resource, on its device or on every device, or None."""
    name, device = resource
    counts = {limit.device: limit.count for limit in limits if limit.name == name}
    return counts.get(device, counts.get(""))


def resource_limits(settings: ServerSettings) -> tuple[ResourceLimit, ...] | None:
    """Return the operator's limits, or None if rates are not limited. Raise ValueError if malformed."""
    if settings.rate_limit != EXECUTION_COUNT:
        return None
    return tuple(ResourceLimit.parse(text) for text in settings.rate_limit_resources)


def check_memory(spec: ModelSpec, settings: ServerSettings) -> None:
    """Raise StartupError if a model declares more memory than a budget, or its own limit on a GPU, allows."""
    limit_nbytes, on_gpu = spec.gpu_memory_nbytes, any(one.device != CPU for one in spec.instances)
    if on_gpu and 0 < limit_nbytes < spec.memory_nbytes:
        raise StartupError(
            f"model {spec.name!r}: expected a memory_nbytes of at most gpu_memory_nbytes, which is "
            f"{limit_nbytes}, given {spec.memory_nbytes}"
        )
    if not spec.on_demand:
        return
    nbytes = spec.declared_nbytes
    for device, limit in settings.memory.limits(nbytes).items():
        if nbytes.get(device, 0) > limit:
            raise StartupError(
                f"model {spec.name!r} takes {nbytes[device]} bytes on {device} (memory_nbytes of its "
                f"instances), and server.memory allows {limit}"
            )


def check_rates(specs: Iterable[ModelSpec], settings: ServerSettings) -> None:
    """Raise StartupError unless the limits and the kinds of resources let every instance execute."""
    limits = resource_limits(settings)
    if limits is None:
        return
    most: dict[DeviceResource, int] = {}
    for instance in (one for spec in specs for one in spec.instances):
        for resource, count in instance.rate.needs(instance.device).items():
            most[resource] = max(most.get(resource, 0), count)
    shared = {name for name, device in most if not device}
    for name, device in most:
        if device and name in shared:
            raise StartupError(
                f'Resource "{name}" is present as both global and device-specific resource in the model '
                "configuration."
            )
    for resource, count in most.items():
        limit = limit_of(resource, limits)
        if limit is not None and limit < count:
            raise StartupError(
                f'Resource count for "{resource[0]}" is limited to {limit} which will prevent scheduling of '
                f"one or more model instances, the minimum required count is {count}"
            )
