"""What can be checked of a configuration before anything is served: its devices and its imports. Each
callable is imported in a child process, so that neither side effects nor a crash reach the caller.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from gpuserve.errors import ConfigError, DeviceError
from gpuserve.placement.libraries import missing_library
from gpuserve.settings.checks import missing

if TYPE_CHECKING:
    from gpuserve.config.entries.model import ModelEntry
    from gpuserve.config.load import Configuration
    from gpuserve.config.messages import Problem
    from gpuserve.config.positions import Path
    from gpuserve.placement.server_devices import ServerDevices


def device_problems(configuration: Configuration, devices: ServerDevices) -> list[Problem]:
    """Find the instances whose device is not there, and the models that lack a library for theirs."""
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
    """Return the key of a model that asks for a library: ``array``, or that of an input on the device."""
    if entry.array is not None:
        return ("array",)
    places = [place for place, one in enumerate(entry.inputs) if one.memory == "gpu"]
    return ("inputs", places[0], "memory")


def with_devices(configuration: Configuration, devices: ServerDevices) -> Configuration:
    """Put every instance on its device; DeviceError: not all are here, with every problem, ready to print."""
    problems = device_problems(configuration, devices)
    if problems:
        raise DeviceError("\n".join(map(str, problems)))
    return dataclasses.replace(configuration, models=tuple(devices.place(configuration.models)))


def trace_problems(configuration: Configuration) -> list[Problem]:
    """Find what tracing needs and this Python does not have."""
    problem = missing(configuration.settings.trace.mode)
    if problem is None:
        return []
    return [configuration.sources.problem(("server", "trace", "mode"), problem)]


def require_trace_output(configuration: Configuration) -> None:
    """Check that requests can be traced as configured; ConfigError: a package is missing, ready to print."""
    problems = trace_problems(configuration)
    if problems:
        raise ConfigError("\n".join(map(str, problems)))


def import_problems(configuration: Configuration) -> list[Problem]:
    """Find the callables that cannot be imported, do not take their ``kwargs``, or answer otherwise."""
    problems = []
    for index, model in enumerate(configuration.entries.models):
        if model.callable is None:
            continue
        try:
            inspect_callable(model.callable, configuration.base_dir, model.kwargs, model.decoupled)
        except ConfigError as error:
            path = ("models", index, "callable")
            problems.append(configuration.sources.problem(path, f"model {model.name!r}: {error}"))
    return problems


def inspect_callable(
    path: str, base_dir: str, kwargs: dict[str, Any] | None = None, decoupled: bool | None = None
) -> dict[str, Any]:
    """What a callable says about itself: "inputs", "outputs", "max_batch_size" (or None), and whether it is
    "decoupled", a generator. The user's prints go to stderr; ConfigError: it is not callable as the model
    wants.
    """
    question = json.dumps({"path": path, "base_dir": base_dir, "kwargs": kwargs, "decoupled": decoupled})
    child = subprocess.run(
        [sys.executable, "-P", "-m", "gpuserve.cli.console.inspect_callable"],
        input=question,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(child.stdout)
    except ValueError:
        raise ConfigError(f"importing {path!r} ended the process {_manner(child.returncode)}") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer


def _manner(returncode: int) -> str:
    if returncode >= 0:
        return f"with exit status {returncode}"
    try:
        return f"by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"by signal {-returncode}"
