"""``gpuserve drain``: take a running server out of service, and put it back."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuserve.cli.operator_call import AsJson, Server, ask, show


def drain(
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.0,
            help="How long to wait, after the lame duck, until nothing runs. Default drain_timeout_s.",
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Put the server back into service.")] = False,
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Take a running server out of service: not ready, but whatever comes is served.

    After lame_duck_s its clients are told that their connections take no more requests.
    Returns when nothing waits, runs or comes; with exit status 1 where that takes too long.
    The server runs on, not ready, until --undo or its end.

    Examples:
      gpuserve drain --timeout 60
      gpuserve drain --undo
    """
    if undo and timeout_s is not None:
        raise typer.BadParameter("what is undone takes no time", param_hint="--timeout")
    arguments = {"undo": True} if undo else {} if timeout_s is None else {"timeout_s": timeout_s}
    show(ask(server, "drain", arguments, as_json), as_json)
