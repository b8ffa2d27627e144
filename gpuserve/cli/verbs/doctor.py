"""``gpuserve doctor``: whether a server would run well here, and what to do where it would not."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpuserve.cli.console.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuserve.cli.doctor.facts import ConfigProblem, Facts
    from gpuserve.config.load import Configuration
    from gpuserve.config.problems import Problem
    from gpuserve.supervisor.placement import ServerDevices


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="What would be served: its ports, its packages, its devices."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Look at what a server needs of this machine, and say what to do about it.

    Python, its packages, the kernel, GPUs and their driver, processors and memory of the control group,
    limits, the clock, other servers, ports; with a config file also what its models need. Each is ok, a
    warning or a fault; with a fault the exit status is 1. Nothing is changed.

    Examples:
      gpuserve doctor
      gpuserve doctor config.yaml --json
    """
    from gpuserve.cli.doctor import report
    from gpuserve.cli.doctor.judgement import findings, has_fault

    found = findings(_facts(config))
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(found), indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(report.as_text(found, shutil.get_terminal_size().columns))
    if has_fault(found):
        raise typer.Exit(ExitCode.RUNTIME_FAILURE)


def _facts(config: str | None) -> Facts:
    from gpuserve.cli.doctor.gathering import facts
    from gpuserve.config.problems import ConfigProblems
    from gpuserve.config.settings.server import ServerSettings
    from gpuserve.config.triton.load import load_target
    from gpuserve.supervisor.placement import ServerDevices

    devices, settings = ServerDevices(), ServerSettings()
    problems: list[ConfigProblem] = []
    if config is not None:
        try:
            configuration = load_target(config, os.environ)
        except ConfigProblems as error:
            problems = _problems(error.problems)
        else:
            settings = configuration.settings
            problems = _problems_of(configuration, devices)
    return facts(settings, devices, config, problems)


def _problems_of(configuration: Configuration, devices: ServerDevices) -> list[ConfigProblem]:
    """What the models of a configuration miss here. Those of a repository that are broken are left out."""
    from gpuserve.cli.console.preflight import device_problems, import_problems, trace_problems

    broken = [one for error in configuration.broken.values() for one in error.problems]
    wrong = [
        *trace_problems(configuration),
        *import_problems(configuration),
        *device_problems(configuration, devices),
    ]
    return [*_problems(wrong), *_problems(broken, fatal=configuration.settings.exit_on_error)]


def _problems(problems: Iterable[Problem], *, fatal: bool = True) -> list[ConfigProblem]:
    from gpuserve.cli.doctor.facts import ConfigProblem

    return [ConfigProblem(str(one).partition("\n")[0], fatal) for one in problems]
