"""``gpuserve load``: load models of the config that a running server does not serve."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuserve.cli.operator_call import AsJson, Server, ask_each


def load(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of models.")],
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Load models that a running server knows and does not serve.

    They are read from its config file as it is now. One that is loaded stays as it is.

    Example:
      gpuserve load linear
    """
    ask_each(server, "load", models, as_json)
