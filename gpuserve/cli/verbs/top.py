"""``gpuserve top``: a running server on one screen."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from gpuserve.cli.console.exit_codes import ExitCode
from gpuserve.cli.console.which_server import Server
from gpuserve.core.errors import ControlError


def top(
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="The column to sort by, such as p99 or queue.")
    ] = "req/s",
    containing: Annotated[
        str, typer.Option("--filter", metavar="TEXT", help="Only models whose name contains this.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print the table once, and end.")] = False,
    server: Server = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object each second, with --once a single one.")
    ] = False,
) -> None:
    """Show what a running server does: its models, their rates and times, GPUs, events.

    Once a second. Keys choose a model, sort, filter, scale, load anew and drain; h lists
    them. The server is asked before nothing is done: each change wants a y.

    Examples:
      gpuserve top
      gpuserve top --sort p99 --server localhost:8000
      gpuserve top --once
      gpuserve top --json | jq .server.requests_per_s
    """
    from gpuserve.cli.top.rows import SORTS

    if sort.lower() not in SORTS:
        raise typer.BadParameter(f"expected one of {', '.join(SORTS)}, given {sort!r}", param_hint="--sort")
    try:
        if as_json:
            _print_json(server, once=once)
        elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print_table(server, sort.lower(), containing)
        else:
            _run(server, sort.lower(), containing)
    except ControlError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(ExitCode.RUNTIME_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None  # that is how it is meant to end


def _print_json(server: str | None, *, once: bool) -> None:
    from gpuserve.cli.top.session import first_sample
    from gpuserve.follow.stream import events

    if once:
        sys.stdout.write(json.dumps(first_sample(server), ensure_ascii=False) + "\n")
        return
    with events(server, ["sample"]) as stream:
        for sample in stream:
            sys.stdout.write(json.dumps(sample, ensure_ascii=False) + "\n")
            sys.stdout.flush()


def _print_table(server: str | None, sort: str, containing: str) -> None:
    from rich.console import Console

    from gpuserve.cli.top.screen import Screen
    from gpuserve.cli.top.session import first_sample, show_once

    show_once(first_sample(server), Screen(sort, containing), Console())


def _run(server: str | None, sort: str, containing: str) -> None:
    from rich.console import Console

    from gpuserve.cli.console.keys import Terminal
    from gpuserve.cli.top.screen import Screen
    from gpuserve.cli.top.session import TopSession
    from gpuserve.supervisor.control.operator_client import ask

    ask(server, "status", {}, lambda _: None)  # a wrong address is said at once, and not on the screen
    with Terminal(sys.stdin.fileno()) as terminal:
        TopSession(server, Screen(sort, containing), Console(), terminal).run()
