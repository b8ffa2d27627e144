"""``gpuserve unload``: let a running server serve models no more."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuserve.cli.operator_call import AsJson, Server, ask_each


def unload(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of models.")],
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Unload models of a running server: what they have is finished, then their workers end.

    Example:
      gpuserve unload linear
    """
    ask_each(server, "unload", models, as_json)
