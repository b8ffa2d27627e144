"""The verbs put together, and the one place where an error becomes an exit status."""

from __future__ import annotations

import json
import platform
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpuserve.cli.console.exit_codes import ExitCode, help_text
from gpuserve.cli.console.failures import exit_code_of, tell
from gpuserve.cli.console.options import command_of
from gpuserve.cli.console.server_options import BlockCommand
from gpuserve.cli.verbs.bench import bench
from gpuserve.cli.verbs.check import check, schema
from gpuserve.cli.verbs.config import config
from gpuserve.cli.verbs.devices import devices
from gpuserve.cli.verbs.doctor import doctor
from gpuserve.cli.verbs.export import export_app
from gpuserve.cli.verbs.new import new
from gpuserve.cli.verbs.operator import add_verbs as add_operator_verbs
from gpuserve.cli.verbs.run import RUN_SETTINGS, run_program
from gpuserve.cli.verbs.serve import dev, serve
from gpuserve.cli.verbs.tritonserver import TRITONSERVER_SETTINGS, tritonserver
from gpuserve.cli.verbs.tune import tune
from gpuserve.core.errors import GpuserveError
from gpuserve.version import VERSION

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

The options of a verb: gpuserve serve --help"""


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
    for serving in (serve, dev):
        app.command(epilog=help_text(), cls=BlockCommand)(serving)
    app.command(context_settings=TRITONSERVER_SETTINGS, add_help_option=False)(tritonserver)
    app.command("run", context_settings=RUN_SETTINGS)(run_program)
    add_operator_verbs(app)
    app.command(epilog=help_text(), cls=BlockCommand)(config)
    for verb in (new, check, devices, doctor, bench, tune, schema, version):
        app.command(epilog=help_text())(verb)
    app.add_typer(export_app())
    return app


def run(arguments: list[str] | None = None, front: EarlyFront | None = None) -> int:
    """Run one command line and return its exit status; ``front`` is one for ``serve`` that already starts."""
    try:
        command_of(build_app())(arguments, prog_name="gpuserve", obj=front)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.USAGE
    except GpuserveError as error:
        return exit_code_of(tell(error))
    return ExitCode.OK


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Print the version of gpuserve.

    Example:
      gpuserve version --json
    """
    if as_json:
        facts = {"gpuserve": VERSION, "python": platform.python_version()}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        _print_version()


def _print_version() -> None:
    sys.stdout.write(f"gpuserve {VERSION}\n")


def _show_version(wanted: bool) -> None:
    if wanted:
        _print_version()
        raise typer.Exit


def _top_level(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options before the verb; the help text is given to ``Typer`` itself."""
