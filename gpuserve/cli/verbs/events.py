"""``gpuserve events``: what happens in a running server, while it happens."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from gpuserve.cli.console.exit_codes import ExitCode
from gpuserve.cli.console.which_server import Server
from gpuserve.core.errors import ControlError, InvalidArgument


def events(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND...]", help="Kinds of events; default all but log and sample."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only what is about this model.")] = None,
    past: Annotated[
        bool, typer.Option("--past", help="Begin with what the server has kept, 500 events at most.")
    ] = False,
    server: Server = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show what happens in a running server, until it ends or you press Ctrl-C.

    The state of the server and of each instance, deaths with their reason, loads,
    reloads, scale, drains, lost GPUs, bursts of refusals, slow batches. With the kind
    sample: once a second how busy it is; with log: each line of its log.

    Examples:
      gpuserve events
      gpuserve events --past instance_died
      gpuserve events --json sample --server localhost:8000
    """
    from gpuserve.follow.stream import EventStream, chosen_kinds

    try:
        chosen = chosen_kinds(kinds or ())
    except InvalidArgument as error:
        raise typer.BadParameter(str(error), param_hint="KIND") from None
    try:
        with EventStream(server, chosen, model=model, past=past) as stream:
            for event in stream:
                _write(event, as_json)
    except ControlError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(ExitCode.RUNTIME_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None  # that is how it is meant to end
    sys.stderr.write("the server has ended\n")


def _write(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        sys.stdout.write(json.dumps(event, ensure_ascii=False) + "\n")
    else:
        from gpuserve.cli.views.event_view import event_line

        sys.stdout.write(event_line(event) + "\n")
    sys.stdout.flush()
