"""Checks of a configuration before it is served: devices, libraries, imports (in child processes)."""

from __future__ import annotations

import dataclasses

from gpuserve.config import load as described
from gpuserve.config.load import Configuration, trace_problems
from gpuserve.config.problems import Problem
from gpuserve.config.yaml_document import Path
from gpuserve.core.errors import ConfigError, DeviceError
from gpuserve.model.placement import ServerDevices, missing_library


def device_problems(configuration: Configuration, devices: ServerDevices) -> list[Problem]:
    """Return the instances whose device does not exist, and the models whose device lacks a library."""
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
            place: Path = ("array",)
            if entry.array is None:  # an input on the device makes the model need the library
                position = next(at for at, one in enumerate(entry.inputs) if one.memory == "gpu")
                place = ("inputs", position, "memory")
            text = f"model {spec.name!r}: {problem}"
            problems.append(configuration.sources.problem(("models", index, *place), text))
    return problems


def with_devices(configuration: Configuration, devices: ServerDevices) -> Configuration:
    """Return the configuration with every instance on its device, or raise DeviceError with all problems."""
    problems = device_problems(configuration, devices)
    if problems:
        raise DeviceError("\n".join(map(str, problems)))
    return dataclasses.replace(configuration, models=tuple(devices.place(configuration.models)))


def require_trace_output(configuration: Configuration) -> None:
    """Raise ConfigError if a package for tracing is not installed."""
    if problems := trace_problems(configuration):
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
    Callables that were asked for values which the file leaves out are known to be right, and are skipped.
    """
    entries, known = configuration.entries.models, configuration.described
    others = [at for at, one in enumerate(entries) if one.callable is not None and at not in known]
    sources = configuration.sources
    asked, _ = described.ask_model_callables(entries, others, configuration.base_dir, (), (), sources)
    found = zip(asked, others, strict=True)
    return [described.import_problem(one, at, sources) for one, at in found if one.answer.problem is not None]
