"""Checks of a configuration before anything is served: devices, libraries, imports of callables. Each
callable is imported in a child process (``gpuserve/model/describe.py``), so that a crash does not reach the
caller.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gpuserve.config import load as described
from gpuserve.config.settings.checks import missing, missing_metrics_packages
from gpuserve.core.errors import ConfigError, DeviceError
from gpuserve.model.placement import missing_library

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.config.problems import Problem
    from gpuserve.config.schema import ModelEntry
    from gpuserve.config.yaml_document import Path
    from gpuserve.model.placement import ServerDevices


def device_problems(configuration: Configuration, devices: ServerDevices) -> list[Problem]:
    """Return the instances whose device does not exist, and the models that lack a library for
    their device.
    """
    problems = []
    pairs = zip(configuration.entries.models, configuration.models, strict=True)
    for index, (entry, spec) in enumerate(pairs):
        for position, instance in enumerate(entry.instances if spec.instances else ()):
            try:
                devices.devices_named(instance.device)
            except DeviceError as error:
                path: Path = ("models", index, "instances", position, "device")
                problems.append(configuration.sources.problem(path, f"model {spec.name!r}: {error}"))
        if problem := missing_library(spec):
            path = ("models", index, *_library_key(entry))
            problems.append(configuration.sources.problem(path, f"model {spec.name!r}: {problem}"))
    return problems


def _library_key(entry: ModelEntry) -> Path:
    """Return the key that makes a model need a library: ``array``, or ``memory`` of an input on the
    device.
    """
    if entry.array is not None:
        return ("array",)
    places = [place for place, one in enumerate(entry.inputs) if one.memory == "gpu"]
    return ("inputs", places[0], "memory")


def with_devices(configuration: Configuration, devices: ServerDevices) -> Configuration:
    """Return the configuration with every instance on its device.

    Raises:
        DeviceError: a device does not exist; the text has a line for every problem.
    """
    problems = device_problems(configuration, devices)
    if problems:
        raise DeviceError("\n".join(map(str, problems)))
    return dataclasses.replace(configuration, models=tuple(devices.place(configuration.models)))


def trace_problems(configuration: Configuration) -> list[Problem]:
    """Return the packages that tracing or the export of metrics needs and that are not installed."""
    settings, sources = configuration.settings, configuration.sources
    found = {
        ("server", "trace", "mode"): missing(settings.trace.mode),
        ("server", "metrics_otlp_url"): missing_metrics_packages(settings.metrics_otlp_url),
    }
    return [sources.problem(place, problem) for place, problem in found.items() if problem is not None]


def require_trace_output(configuration: Configuration) -> None:
    """Raise ConfigError if a package for tracing or for the export of metrics is not installed."""
    problems = trace_problems(configuration)
    if problems:
        raise ConfigError("\n".join(map(str, problems)))


def require_models(configuration: Configuration) -> None:
    """Raise ConfigProblems if a model of the start cannot be served and ``exit_on_error`` is set."""
    from gpuserve.config.problems import ConfigProblems
    from gpuserve.supervisor.models.declared_models import wanted_at_start

    if configuration.settings.exit_on_error:
        wanted = wanted_at_start(configuration.broken, configuration.settings.load_at_start)
        problems = [one for name in wanted for one in configuration.broken[name].problems]
        if problems:
            raise ConfigProblems(problems)


def import_problems(configuration: Configuration) -> list[Problem]:
    """Return the callables that cannot be imported, refuse their ``kwargs``, or contradict the file.
    Callables that were asked for the values which the file leaves out are known to be right, and are skipped.
    """
    entries = configuration.entries.models
    others = [
        index
        for index, one in enumerate(entries)
        if one.callable is not None and index not in configuration.described
    ]
    answers = [
        one.answer for one in described.ask_model_callables(entries, others, configuration.base_dir, ())
    ]
    return list(described.import_problems(entries, others, answers, configuration.sources))
