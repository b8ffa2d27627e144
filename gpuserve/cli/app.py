"""The app with all commands, and the exit status of an error."""

from __future__ import annotations

import json
import platform
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpuserve.cli.bench_command import bench
from gpuserve.cli.check_command import check, config, devices, doctor, schema
from gpuserve.cli.exit_codes import ExitCode, exit_code_of, help_text, report_error
from gpuserve.cli.export_command import export_app
from gpuserve.cli.new.new_command import new
from gpuserve.cli.operator_commands import add_commands as add_operator_commands
from gpuserve.cli.option_types import command_of
from gpuserve.cli.serve_command import BlockCommand, dev, serve
from gpuserve.cli.triton_commands import RUN_SETTINGS, TRITONSERVER_SETTINGS, run_program, tritonserver
from gpuserve.cli.tune_command import tune
from gpuserve.core.errors import GpuserveError
from gpuserve.core.version import VERSION

if TYPE_CHECKING:
    from gpuserve.supervisor.processes.child_process import EarlyFront

_EXAMPLES = """Examples:
  gpuserve serve config.yaml
  gpuserve serve model.py:predict --input x:float32:-1 --output y:float32:-1
  gpuserve new sentiment
  gpuserve dev model.py
  gpuserve tritonserver --model-repository=/models
  gpuserve run program.py
  gpuserve status
  gpuserve check config.yaml
  gpuserve config config.yaml
  gpuserve doctor
  gpuserve devices
  gpuserve bench echo --shape x:16
  gpuserve export kubernetes config.yaml --image my/models:1 --out cluster
  gpuserve schema > gpuserve.schema.json

The options of a command: gpuserve serve --help"""


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="gpuserve",
        help=f"Serve Python inference callables over gRPC and HTTP.\n\n{_EXAMPLES}",
        epilog=help_text(),
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_top_level)
    for command in (serve, dev):
        app.command(epilog=help_text(), cls=BlockCommand)(command)
    app.command(context_settings=TRITONSERVER_SETTINGS, add_help_option=False)(tritonserver)
    app.command("run", context_settings=RUN_SETTINGS)(run_program)
    add_operator_commands(app)
    app.command(epilog=help_text(), cls=BlockCommand)(config)
    for command in (new, check, devices, doctor, bench, tune, schema, version):
        app.command(epilog=help_text())(command)
    app.add_typer(export_app())
    return app


def run(arguments: list[str] | None = None, front: EarlyFront | None = None) -> int:
    """Run a command line and return its exit status. ``front`` is a front process that already starts."""
    try:
        command_of(build_app())(arguments, prog_name="gpuserve", obj=front)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.USAGE
    except GpuserveError as error:
        report_error(error)
        return exit_code_of(error)
    return ExitCode.OK


def version(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Print the version of gpuserve.

    Example:
      gpuserve version --json
    """
    facts = {"gpuserve": VERSION, "python": platform.python_version()}
    sys.stdout.write(f"{json.dumps(facts)}\n" if as_json else f"gpuserve {VERSION}\n")


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"gpuserve {VERSION}\n")
        raise typer.Exit


def _top_level(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Handle the options before the command; ``Typer`` itself has the help text."""
