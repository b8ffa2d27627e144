"""``gpuserve version``."""

from __future__ import annotations

import json
import platform
import sys
from typing import Annotated

import typer

from gpuserve import __version__


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Print the version of gpuserve.

    Example:
      gpuserve version --json
    """
    if as_json:
        facts = {"gpuserve": __version__, "python": platform.python_version()}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        print_version()


def print_version() -> None:
    """The version as one line on stdout."""
    sys.stdout.write(f"gpuserve {__version__}\n")
