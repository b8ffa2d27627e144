"""``gpuserve events`` and ``gpuserve logs``: events and log lines of a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gpuserve.cli.exit_codes import until_interrupted
from gpuserve.cli.live.status_view import event_line
from gpuserve.cli.option_types import Server
from gpuserve.core.errors import ControlError, InvalidArgument


def events(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND...]", help="Kinds of events; default all but log and sample."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only events of this model.")] = None,
    past: Annotated[
        bool, typer.Option("--past", help="Start with the events that the server has kept, 500 at most.")
    ] = False,
    server: Server = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show events of a running server, until it ends or you press Ctrl-C.

    Events are: changes of state of the server and of each instance, deaths with their
    reason, loads, reloads, scaling, drains, lost GPUs, bursts of rejections, slow batches.
    The kind sample has the load of the server once a second; the kind log has each line
    of its log.

    Examples:
      gpuserve events
      gpuserve events --past instance_died
      gpuserve events --json sample --server localhost:8000
    """
    from gpuserve.cli.live.event_client import EventStream, chosen_kinds

    try:
        chosen = chosen_kinds(kinds or ())
    except InvalidArgument as error:
        raise typer.BadParameter(str(error), param_hint="KIND") from None
    with until_interrupted(), EventStream(server, chosen, model=model, past=past) as stream:
        for event in stream:
            _write_line(event, event_line(event), as_json)
    sys.stderr.write("the server has ended\n")


def logs(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Only log lines and prints of this model's workers."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with each new line.")] = False,
    server: Server = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show the last lines of a running server's log, wherever the server writes it.

    A server keeps 1000 lines at most. In a program with Server, prints of workers go to
    the program's own output, and only their log lines are shown here.

    Examples:
      gpuserve logs
      gpuserve logs -f linear
    """
    with until_interrupted():
        if follow:
            _follow_log(server, model, as_json)
        else:
            for line in _kept_lines(server, model):
                _write_line(line, line["line"], as_json)


def _follow_log(server: str | None, model: str | None, as_json: bool) -> None:
    """Write the kept lines and then each new one, every line once."""
    from gpuserve.cli.live.event_client import EventStream
    from gpuserve.core.event_log import EventKind

    last = 0
    with EventStream(server, [EventKind.LOG], model=model) as stream:
        for line in _kept_lines(server, model):
            last = line["number"]
            _write_line(line, line["line"], as_json)
        for line in stream:
            if line["number"] > last:
                _write_line(line, line["line"], as_json)
    sys.stderr.write("the server has ended\n")


def _kept_lines(server: str | None, model: str | None) -> list[dict[str, Any]]:
    from gpuserve.supervisor.control.operator_client import ask

    outcome = ask(server, "logs", {"model": model}, lambda _: None)
    if outcome.code:
        raise ControlError(outcome.text)
    return list(outcome.result["lines"])


def _write_line(document: Mapping[str, Any], text: str, as_json: bool) -> None:
    sys.stdout.write(f"{json.dumps(document, ensure_ascii=False) if as_json else text}\n")
    sys.stdout.flush()
