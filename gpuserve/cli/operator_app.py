"""The verbs for a running server as a command line of their own: they need little, and start fast."""

from __future__ import annotations

import sys
from typing import Final

import typer

from gpuserve.cli.drain import drain
from gpuserve.cli.exit_codes import ExitCode, help_text
from gpuserve.cli.load import load
from gpuserve.cli.reload import reload
from gpuserve.cli.scale import scale
from gpuserve.cli.status import status
from gpuserve.cli.unload import unload
from gpuserve.errors import GpuserveError

VERBS: Final = (status, drain, load, unload, reload, scale)


def add_verbs(app: typer.Typer) -> None:
    """Add the verbs to a command line."""
    for verb in VERBS:
        app.command(epilog=help_text())(verb)


def run() -> int:
    """Run ``sys.argv``, whose first word is one of the verbs, and return its exit status."""
    app = typer.Typer(
        name="gpuserve",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    add_verbs(app)
    try:
        app(prog_name="gpuserve")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.USAGE
    except GpuserveError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.RUNTIME_FAILURE
    except OSError as error:  # of stdout: the disk is full
        sys.stderr.write(f"stdout: {error.strerror}\n")
        return ExitCode.RUNTIME_FAILURE
    return ExitCode.OK
