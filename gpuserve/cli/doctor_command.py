"""``gpuserve doctor``: findings on whether a server would run well on this machine, each with advice."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Annotated

import typer

from gpuserve.cli.exit_codes import ExitCode


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", help="A target of serve, whose ports, packages and devices are checked."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Check what a server needs of this machine, and advise on problems.

    Python, its packages, the kernel, GPUs and their driver, processors and memory of the control group,
    limits, the clock, other servers, ports; with a config file also the needs of its models. Each finding is
    ok, a warning or a fault; after a fault the exit status is 1. Nothing is changed.

    Examples:
      gpuserve doctor
      gpuserve doctor config.yaml --json
    """
    from gpuserve.cli.doctor_checks import all_findings, findings_as_text, has_fault

    found = all_findings(config)
    if as_json:
        findings = {"ok": not has_fault(found), "findings": [one.as_json() for one in found]}
        sys.stdout.write(json.dumps(findings, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(findings_as_text(found, shutil.get_terminal_size().columns))
    if has_fault(found):
        raise typer.Exit(ExitCode.RUNTIME_FAILURE)
