"""``gpuserve devices``: the GPUs of this machine, and which of them a configuration would use."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuserve.model.spec import ModelSpec
    from gpuserve.supervisor.placement import ServerDevices


def devices(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="A config file: where would its models run?")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """List the GPUs of this machine: names to use in a config, memory, NUMA node, MIG, driver.

    With a config file also which instance of its models would run on which device.
    Without a GPU it says what was found and what is missing; that is no failure.

    Examples:
      gpuserve devices
      gpuserve devices config.yaml --json
    """
    from gpuserve.cli.views import device_report
    from gpuserve.core.errors import DeviceError
    from gpuserve.supervisor.placement import ServerDevices, installed_cupy

    known = ServerDevices()
    inventory, cupy = known.inventory(), installed_cupy()
    models, absent = None, None
    if config is not None:
        try:
            models = _placed(config, known)
        except DeviceError as error:
            absent = error
    if as_json:
        facts = device_report.as_json(inventory, cupy, models)
        sys.stdout.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(device_report.as_text(inventory, cupy, models))
    if absent is not None:
        raise absent


def _placed(config: str, known: ServerDevices) -> Sequence[ModelSpec]:
    """Return a file's models, placed; ConfigProblems: the file is wrong; DeviceError: a device is missing."""
    from gpuserve.cli.console.preflight import with_devices
    from gpuserve.config.load import load_file

    return with_devices(load_file(config, os.environ), known).models
