"""``gpuserve logs``: the last lines of a running server's log, and with ``-f`` the next ones."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from gpuserve.cli.console.exit_codes import ExitCode
from gpuserve.cli.console.which_server import Server
from gpuserve.core.errors import ControlError


def logs(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Only what workers of this model log and print."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each line that comes.")] = False,
    server: Server = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show the last lines of the log of a running server, wherever it writes that to.

    A server keeps 1000 lines at most. In a program with Server, what workers print goes
    to the program's own output, and only what is logged is here.

    Examples:
      gpuserve logs
      gpuserve logs -f linear
    """
    try:
        if follow:
            _follow(server, model, as_json)
        else:
            for line in _kept(server, model):
                _write(line, as_json)
    except ControlError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(ExitCode.RUNTIME_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None  # that is how it is meant to end


def _follow(server: str | None, model: str | None, as_json: bool) -> None:
    """Write the lines that are kept and each that comes, all of them once."""
    from gpuserve.core.event_log import EventKind
    from gpuserve.follow.stream import EventStream

    last = 0
    with EventStream(server, [EventKind.LOG], model=model) as stream:
        for line in _kept(server, model):
            last = line["number"]
            _write(line, as_json)
        for line in stream:
            if line["number"] > last:
                _write(line, as_json)
    sys.stderr.write("the server has ended\n")


def _kept(server: str | None, model: str | None) -> list[dict[str, Any]]:
    from gpuserve.supervisor.control.operator_client import ask

    outcome = ask(server, "logs", {"model": model}, lambda _: None)
    if outcome.code:
        raise ControlError(outcome.text)
    return list(outcome.result["lines"])


def _write(line: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        text = json.dumps(line, ensure_ascii=False)
    else:
        text = line["line"]
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
